"""Bytes that a rank will send in one optimizer step, from the placement alone: what ``traffic.py`` then counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..distributed.mesh import Coordinates, Holders
from ..distributed.traffic import Kind, Scope, Traffic, sent_bytes
from ..placement.layout import Layout

FLOAT32 = 4
CONTROL_BYTES = 16  # the squared gradient norm and the loss, a float64 each


@dataclass(frozen=True)
class Collective:
    """All of a step's collectives of one kind among the same ``ranks``, ascending; ``nbytes``: of their whole buffers."""

    scope: Scope
    kind: Kind
    ranks: tuple[int, ...]
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends; of a broadcast the buffer, which it has or passes on."""
        return sent_bytes(self.kind, self.nbytes, len(self.ranks))


_Whom = tuple[
    Literal["inside", "neighbours", "holders", "refresh", "world"], Holders
]  # with whom a rank of any place takes part
_INSIDE: _Whom = ("inside", ())
_NEIGHBOURS: _Whom = ("neighbours", ())
_WORLD: _Whom = ("world", ())


class CollectivePlan:
    """What every rank of a layout sends in one training step under ZeRO ``stage``, by who takes part.

    Between groups: every trainable parameter of a unit with n holder ranks is all-reduced once, 2(n − 1)/n of its local shard in
    float32. Inside a group of F ranks: parameters are gathered in compute precision (``compute_bytes`` an element) once a step at
    stages 1 and 2, twice a micro-batch (forward and backward) at stage 3; gradients are reduce-scattered in float32, once a step
    at stage 1, every micro-batch at stages 2 and 3; (F − 1)/F of the padded parameter each time. One scalar for the norm.

    Frozen copies (backward masking) are gathered as parameters are. Holders share out the groups without a unit: each broadcasts its
    local shard in compute precision once a step to its part of them, of whom all but one pass it on.

    A module of a user's own model that is called several times in a forward pass is gathered as often at stage 3, and one that is frozen
    like all before it is not gathered for backward: neither is known here.

    Under tensor parallelism all of this is of a rank's part of the matrices, and gradients of what is not cut (norms) are gathered once
    a step. What its ranks send of activations ("tensor parallel") depends on the batch, not on the placement: ``trace.py`` knows it.
    """

    def __init__(self, layout: Layout, *, stage: int, accumulation: int, compute_bytes: int):
        self._layout, self._compute_bytes = layout, compute_bytes
        self._world = tuple(range(layout.mesh.world_size))
        self._shards = layout.mesh.shards(stage)
        self._gathers = 2 * accumulation if stage == 3 else 1
        self._scatters = accumulation if stage >= 2 else 1
        self._rows = {info.part[0] if info.shape else 1 for info in layout.parameters.values()}
        # Thousands of ranks share few sums, and collectives of thousands.
        self._sums: dict[tuple[int, int], Counter[tuple[Scope, Kind, _Whom]]] = {}
        self._many: dict[tuple[_Whom, int, int], tuple[int, ...]] = {}

    def of(self, rank: int) -> list[Collective]:
        """What ``rank`` sends."""
        at = self._layout.mesh.coordinates(rank)
        all_of_it = (
            Collective(scope, kind, self._ranks(whom, at), nbytes)
            for (scope, kind, whom), nbytes in self._bytes(at).items()
        )
        return [one for one in all_of_it if len(one.ranks) > 1 and one.nbytes]

    def _bytes(self, at: Coordinates) -> Counter[tuple[Scope, Kind, _Whom]]:
        """Of whole buffers: the same for all ranks of a group whose shards are full."""
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
                totals["between groups", "all_reduce", ("holders", info.holders)] += local * FLOAT32
                totals["inside groups", "reduce_scatter", _INSIDE] += self._scatters * padded * FLOAT32
                if info.tp_dim is None:
                    totals["inside groups", "all_gather", _NEIGHBOURS] += local * FLOAT32 * layout.mesh.tp
        for info in layout.frozen(group):
            padded = info.padded_shard_numel(shards) * shards
            totals["inside groups", "all_gather", _INSIDE] += self._gathers * padded * self._compute_bytes
        for refresh in layout.refreshes:
            if refresh.sent_by(group):
                nbytes = _numel(layout, refresh.names, shards, index) * self._compute_bytes
                totals["between groups", "broadcast", ("refresh", refresh.members)] += nbytes
        totals["control", "all_reduce", _WORLD] += CONTROL_BYTES
        return totals

    def _ranks(self, whom: _Whom, at: Coordinates) -> tuple[int, ...]:
        (place, groups), mesh = whom, self._layout.mesh
        if place == "world":
            return self._world
        if place == "neighbours":
            return mesh.neighbours(at.sdp, at.fsdp)
        if place == "inside":
            groups, everywhere = (at.sdp,), self._shards > 1
        else:
            everywhere = (
                place == "holders" and self._shards == 1
            )  # nothing is sharded: a group's ranks average among themselves too
        if not everywhere:
            return tuple(mesh.rank(group, at.fsdp, at.tp) for group in sorted(groups))
        key = (whom, at.sdp if place == "inside" else 0, at.tp)
        if key not in self._many:
            self._many[key] = tuple(
                mesh.rank(group, fsdp, at.tp) for group in sorted(groups) for fsdp in range(mesh.fsdp)
            )
        return self._many[key]


def plan_collectives(
    layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int
) -> list[Collective]:
    """:class:`CollectivePlan` of one rank."""
    return CollectivePlan(layout, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes).of(rank)


def plan_traffic(layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int) -> Traffic:
    """:func:`plan_collectives`, added up as they are counted in a run."""
    traffic = Traffic()
    for collective in plan_collectives(
        layout, rank, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes
    ):
        traffic.record(collective.scope, collective.kind, collective.nbytes, len(collective.ranks))
    return traffic


def data_parallel_traffic(layout: Layout) -> Traffic:
    """What every rank of DistributedDataParallel over the same ranks sends: one all-reduce of all float32 gradients."""
    traffic = Traffic()
    numel = sum(info.numel for info in layout.parameters.values() if info.trainable)
    traffic.record("between groups", "all_reduce", numel * FLOAT32, layout.mesh.world_size)
    return traffic


def _refreshed(layout: Layout, group: int, shards: int, index: int) -> int:
    """Elements that a rank of ``group`` sends after a step, as the source of frozen copies or passing them on."""
    return sum(_numel(layout, refresh.names, shards, index) for refresh in layout.refreshes if refresh.sent_by(group))


def _numel(layout: Layout, names: Sequence[str], shards: int, index: int) -> int:
    return sum(
        layout.parameters[name].shard_numel(shards, index) for name in names if layout.parameters[name].trainable
    )


def describe_formula(layout: Layout, rank: int, *, stage: int, compute_bytes: int = FLOAT32) -> str:
    """The between-groups formula with this rank's numbers filled in."""
    at = layout.mesh.coordinates(rank)
    shards = layout.mesh.shards(stage)
    index = at.fsdp if shards > 1 else 0
    terms: dict[int, int] = {}
    for info in layout.held(at.sdp):
        ranks = len(info.holders) * (layout.mesh.fsdp // shards)
        if info.trainable and ranks > 1:
            terms[ranks] = terms.get(ranks, 0) + info.shard_numel(shards, index) * FLOAT32
    parts = [f"2·{n - 1}/{n}·{nbytes:,} B" for n, nbytes in sorted(terms.items())]
    refreshed = _refreshed(layout, at.sdp, shards, index) * compute_bytes
    parts += [f"{refreshed:,} B of new weights"] * (refreshed > 0)
    return " + ".join(parts) or "nothing is sent between groups"
