"""Plans the bytes that a rank will send in one optimizer step, from the placement alone.

``distributed/collectives.py`` counts the same bytes in a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..distributed.collectives import Kind, Scope, Traffic, sent_bytes
from ..distributed.mesh import Coordinates, Holders
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo

FLOAT32 = 4
CONTROL_BYTES = 16  # the squared gradient norm and the loss, each a float64
# A local step sends the squared norm inside the group, and then loss, norm and two counts among all
# ranks.
NORM_BYTES, LOCAL_CONTROL_BYTES = 8, 32


@dataclass(frozen=True)
class Collective:
    """All of a step's collectives of one kind among the same ranks.

    ``ranks`` are in ascending order. ``nbytes`` counts the bytes of the whole buffers.
    """

    scope: Scope
    kind: Kind
    ranks: tuple[int, ...]
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends.

        For a broadcast, this is the whole buffer, which the rank sends first or passes on.
        """
        return sent_bytes(self.kind, self.nbytes, len(self.ranks))


# The partners of a rank in a collective, in a form that does not depend on the rank's coordinates.
_Whom = tuple[Literal["inside", "neighbours", "holders", "refresh", "world", "replicas", "group"], Holders]
_INSIDE: _Whom = ("inside", ())
_NEIGHBOURS: _Whom = ("neighbours", ())
_WORLD: _Whom = ("world", ())
_REPLICAS: _Whom = ("replicas", ())
_GROUP: _Whom = ("group", ())


class CollectivePlan:
    """The collectives of every rank of a layout in one training step under ZeRO ``stage``.

    - Between groups: every trainable parameter is all-reduced once in float32. If n ranks hold it,
      a rank sends 2(n − 1)/n of its local shard.
    - Inside a group of F ranks, parameters are gathered in compute precision (``compute_bytes`` per
      element). This happens once a step at stages 1 and 2, and twice a micro-batch (forward and
      backward) at stage 3.
    - Inside a group of F ranks, gradients are reduce-scattered in float32. This happens once a step
      at stage 1, and in every micro-batch at stages 2 and 3.
    - Each of these collectives inside a group sends (F − 1)/F of the padded parameter.
    - All ranks sum the squared gradient norm and the loss once a step.

    Frozen copies (backward masking) are gathered as parameters are. The holders of a unit divide
    the groups without the unit among themselves. Once a step, each holder broadcasts its local
    shard in compute precision to its share of these groups. All but one of the receivers pass it
    on.

    One effect is not known here. If a module and all modules before it are frozen, it is not
    gathered for backward.

    Under tensor parallelism, all bytes are those of a rank's part of the matrices. The gradients of
    parameters that are not cut (norms) are gathered once a step. The activations that tensor
    parallelism sends depend on the batch, not on the placement. ``engine/tracing/`` counts them.

    With ``local`` the step is a local step (``sdp.sync``). Gradients are averaged inside the group
    only, and copies are not refreshed. Each group sums its squared norm. All ranks sum the loss,
    the norm and the number of groups that took the step.

    ``optimizer_gathers`` gives the bytes per element that the optimizer gathers of a parameter
    inside the group, once a step.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        stage: int,
        accumulation: int,
        compute_bytes: int,
        local: bool = False,
        optimizer_gathers: Callable[[TensorInfo], int] | None = None,
    ):
        self._optimizer_gathers = optimizer_gathers
        self._layout, self._compute_bytes, self._local = layout, compute_bytes, local
        self._world = tuple(range(layout.mesh.world_size))
        self._shards = layout.mesh.shards(stage)
        self._gathers = 2 * accumulation if stage == 3 else 1
        self._scatters = accumulation if stage >= 2 else 1
        self._rows = {info.part[0] if info.shape else 1 for info in layout.parameters.values()}
        # Both are cached. Thousands of ranks share a few sums, and thousands of ranks take part in
        # the same collective.
        self._sums: dict[tuple[int, int], Counter[tuple[Scope, Kind, _Whom]]] = {}
        self._many: dict[tuple[_Whom, int, int], tuple[int, ...]] = {}

    def of(self, rank: int) -> list[Collective]:
        """Return the collectives in which ``rank`` sends something."""
        at = self._layout.mesh.coordinates(rank)
        all_of_it = (
            Collective(scope, kind, self._ranks(whom, at), nbytes)
            for (scope, kind, whom), nbytes in self._bytes(at).items()
        )
        return [one for one in all_of_it if len(one.ranks) > 1 and one.nbytes]

    def ranks_of(self, holders: Holders, at: Coordinates) -> tuple[int, ...]:
        """Return the ranks that average with the rank at ``at`` what the groups ``holders``
        hold.
        """
        return self._ranks(("holders", holders), at)

    def _bytes(self, at: Coordinates) -> Counter[tuple[Scope, Kind, _Whom]]:
        """Return the bytes of whole buffers, by scope, kind and partners.

        They are the same for all ranks of a group whose shards are full.
        """
        index = (
            at.fsdp
            if self._shards > 1 and any((at.fsdp + 1) * -(-rows // self._shards) > rows for rows in self._rows)
            else 0
        )
        if (at.sdp, index) not in self._sums:
            self._sums[at.sdp, index] = self._add_up(at.sdp, index)
        return self._sums[at.sdp, index]

    def _add_up(self, group: int, index: int) -> Counter[tuple[Scope, Kind, _Whom]]:
        layout, shards = self._layout, self._shards
        totals: Counter[tuple[Scope, Kind, _Whom]] = Counter()
        for info in layout.held(group):
            padded = info.padded_shard_numel(shards) * shards
            totals["inside groups", "all_gather", _INSIDE] += self._gathers * padded * self._compute_bytes
            if info.trainable:
                local = info.shard_numel(shards, index)
                if self._local:
                    totals["inside groups", "all_reduce", _REPLICAS] += local * FLOAT32
                else:
                    totals["between groups", "all_reduce", ("holders", info.holders)] += local * FLOAT32
                if self._optimizer_gathers is not None:
                    totals["inside groups", "all_gather", _INSIDE] += padded * self._optimizer_gathers(info)
                totals["inside groups", "reduce_scatter", _INSIDE] += self._scatters * padded * FLOAT32
                if info.tp_dim is None:
                    totals["inside groups", "all_gather", _NEIGHBOURS] += local * FLOAT32 * layout.mesh.tp
        for info in layout.frozen(group):
            padded = info.padded_shard_numel(shards) * shards
            totals["inside groups", "all_gather", _INSIDE] += self._gathers * padded * self._compute_bytes
        for refresh in () if self._local else layout.refreshes:
            if refresh.sent_by(group):
                nbytes = _numel(layout, refresh.names, shards, index) * self._compute_bytes
                totals["between groups", "broadcast", ("refresh", refresh.members)] += nbytes
        totals["control", "all_reduce", _WORLD] += LOCAL_CONTROL_BYTES if self._local else CONTROL_BYTES
        if self._local:
            totals["control", "all_reduce", _GROUP] += NORM_BYTES
        return totals

    def _ranks(self, whom: _Whom, at: Coordinates) -> tuple[int, ...]:
        (scope, groups), mesh = whom, self._layout.mesh
        if scope == "world":
            return self._world
        if scope == "neighbours":
            return mesh.neighbours(at.sdp, at.fsdp)
        if scope == "group":
            return tuple(mesh.ranks_of(at.sdp))
        if scope == "replicas":
            return tuple(mesh.ranks_of(at.sdp)[at.tp :: mesh.tp]) if self._shards == 1 else ()
        if scope == "inside":
            groups, everywhere = (at.sdp,), self._shards > 1
        else:
            # If nothing is sharded, the ranks of one group average among themselves too.
            everywhere = scope == "holders" and self._shards == 1
        if not everywhere:
            return tuple(mesh.rank(group, at.fsdp, at.tp) for group in sorted(groups))
        key = (whom, at.sdp if scope == "inside" else 0, at.tp)
        if key not in self._many:
            self._many[key] = tuple(
                mesh.rank(group, fsdp, at.tp) for group in sorted(groups) for fsdp in range(mesh.fsdp)
            )
        return self._many[key]


def plan_collectives(
    layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int
) -> list[Collective]:
    """Plan the collectives of one rank by :class:`CollectivePlan`."""
    return CollectivePlan(layout, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes).of(rank)


def plan_traffic(layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int) -> Traffic:
    """Add up the bytes of :func:`plan_collectives` as a run counts them."""
    traffic = Traffic()
    for collective in plan_collectives(
        layout, rank, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes
    ):
        traffic.record(collective.scope, collective.kind, collective.nbytes, len(collective.ranks))
    return traffic


def plan_waking(layout: Layout, rank: int, *, stage: int, compute_bytes: int) -> Traffic:
    """Plan the bytes with which all frozen copies get their values when a backward phase begins."""
    at, shards, traffic = layout.mesh.coordinates(rank), layout.mesh.shards(stage), Traffic()
    index = at.fsdp if shards > 1 else 0
    for refresh in layout.refreshes:
        if refresh.sent_by(at.sdp):
            numel = sum(layout.parameters[name].shard_numel(shards, index) for name in refresh.names)
            traffic.record("between groups", "broadcast", numel * compute_bytes, len(refresh.members))
    return traffic


def data_parallel_traffic(layout: Layout) -> Traffic:
    """Return the traffic of DistributedDataParallel over the same ranks, equal on all ranks.

    It is one all-reduce of all float32 gradients, of one path if there are several.
    """
    traffic = Traffic()
    numel = sum(info.numel for info in layout.parameters_at(0).values() if info.trainable)
    traffic.record("between groups", "all_reduce", numel * FLOAT32, layout.mesh.world_size)
    return traffic


def _refreshed(layout: Layout, group: int, shards: int, index: int) -> int:
    """Return the number of elements of frozen copies that a rank of ``group`` sends after a step.

    The rank is the source of a copy or passes it on.
    """
    return sum(_numel(layout, refresh.names, shards, index) for refresh in layout.refreshes if refresh.sent_by(group))


def _numel(layout: Layout, names: Sequence[str], shards: int, index: int) -> int:
    return sum(
        layout.parameters[name].shard_numel(shards, index) for name in names if layout.parameters[name].trainable
    )
