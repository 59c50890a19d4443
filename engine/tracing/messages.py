"""Finds what each rank of a run sends in a step, from the trace of a single rank.

All ranks of a group send the same inside the group, so the trace of one rank shows these messages.
What a rank sends to other groups depends on the holders of each unit. So for each group, the code
that sends it runs once, with tensors that have shapes and no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn

from ..config.schema import Config
from ..distributed.collectives import Among, Collective, Traffic
from ..distributed.fake_world import fake_world
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..service.anchors import Slice
from ..service.wire import encode
from ..stores import store
from ..subnetwork.copies import Kind, quantise
from ..sync.gradients import GradientSync, WeightRefresh
from ..sync.outer import Compression, OuterSteps, fragments_of


class _Counted(store.Messages):
    """Sends nothing. The code that calls it has already counted the bytes in its Traffic."""

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Any:
        return self

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> Any:
        return self

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
        return self

    def wait(self) -> None:
        pass


class Messages:
    """Finds what each rank of a run sends, by the kind of collective."""

    def __init__(self, layout: Layout, config: Config):
        self._layout, self._config, self._mesh, self._sync = layout, config, layout.mesh, config.sdp.sync
        self._shards = layout.mesh.shards(config.zero_optimization.stage)
        self._known: dict[tuple[int, int], list[Counter[Among]]] = {}  # thousands of ranks share a few sums
        self._moves: dict[Any, tuple[int, ...]] = {}

    def of_step(self, rank: int, traced: int, inside: Iterable[Collective]) -> list[Collective]:
        """Return what ``rank`` sends in a step. With local steps, averages of weights are left out.

        Args:
            rank: The rank.
            traced: The rank whose step was traced. Its group computes the same as the group of
                ``rank``.
            inside: The collectives of ``traced`` in that step, without those between groups.
        """
        found = [one._replace(ranks=self._moved(one.ranks, rank)) for one in inside]
        return found if self._sync is not None else found + self._between(rank, 0)

    def of_round(self, rank: int) -> list[Collective]:
        """Return what ``rank`` sends to other groups in a round of local steps."""
        count = self._sync.fragments if self._sync is not None and self._sync.service is None else 0
        return [one for fragment in range(count) for one in self._between(rank, fragment)]

    def of_service(self) -> tuple[int, int]:
        """Return the bytes that the averaging service receives and sends in a round."""
        mesh, compression = self._mesh, self._sync.compression if self._sync is not None else "none"
        received = sent = 0
        for group in mesh.groups:
            held = [info for info in self._layout.held(group) if info.trainable]
            for info in held:  # ranks with equal tensors deliver one of them
                kind = compression if len(info.holders) > 1 else "none"
                shapes = [self._shape(info, index) for index in range(self._shards)]
                received += sum(_nbytes(shape, kind) for shape in shapes) * (1 if info.tp_dim is None else mesh.tp)
            for info in (*held, *self._layout.frozen(group)):  # every rank fetches what it has
                sent += _nbytes(info.tp_shape, "none") * mesh.tp * (mesh.fsdp // self._shards)
        return received, sent

    def in_busiest_step(self, rank: int) -> float:
        """Return the bytes that ``rank`` sends between groups in the busiest step of a round.

        With overlap, averages of weights and refreshes of frozen copies are in different steps, so
        their bytes are not added.
        """
        assert self._sync is not None
        steps = []
        for fragment in range(self._sync.fragments):
            sent = Counter[bool]()
            for one in self._between(rank, fragment):
                sent[self._sync.overlap > 0 and one.kind == "broadcast"] += one.sent  # type: ignore[assignment]
            steps += sent.values()
        return max(steps, default=0.0)

    def _between(self, rank: int, fragment: int) -> list[Collective]:
        """Return what a rank sends between groups in a step, or in the average of ``fragment``."""
        at = self._mesh.coordinates(rank)
        key = at.sdp, self._alike[at.fsdp]
        if key not in self._known:
            self._known[key] = self._sent(*key)
        sent = self._known[key][fragment].items()
        return [Collective(scope, kind, self._moved(ranks, rank), nbytes) for (scope, kind, ranks), nbytes in sent]

    @cached_property
    def _alike(self) -> list[int]:
        """For each data rank of a group, the first one whose shards have the same shapes.

        The number of rows alone decides how a parameter is divided into shards.
        """
        infos = {info.tp_shape[0] if info.shape else 1: info for info in self._layout.parameters.values()}
        first: dict[Any, int] = {}
        indices = range(self._mesh.fsdp) if self._shards > 1 else [0] * self._mesh.fsdp
        sizes = (tuple(info.shard_numel(self._shards, index) for info in infos.values()) for index in indices)
        return [first.setdefault(key, index) for index, key in zip(indices, sizes, strict=True)]

    def _shape(self, info: TensorInfo, index: int) -> torch.Size:
        first, last = info.shard_rows(self._shards, index)
        return torch.Size((last - first, *info.tp_shape[1:]) if info.shape else ())

    def _sent(self, group: int, index: int) -> list[Counter[Among]]:
        """Return what a rank sends to other groups in a step, or in the average of each fragment.

        With frozen copies that are refreshed rarely, the result is the mean of the steps.
        """
        layout, mesh, copies = self._layout, self._mesh, self._layout.copies
        dtype = getattr(torch, self._config.precision)
        quantised = {name for name, info in layout.parameters.items() if info.is_quantised(copies.dtype)}

        def shard(info: TensorInfo) -> torch.Tensor:
            return torch.empty(self._shape(info, index), device="meta")

        held = {i.name: nn.Parameter(shard(i), requires_grad=i.trainable) for i in layout.held(group)}
        tensors: dict[str, torch.Tensor] = {**held}
        for info in layout.frozen(group):
            if info.name in quantised:
                tensors |= zip(
                    (f"{info.name}:q", f"{info.name}:s"), _quantised(shard(info).shape, copies.dtype), strict=True
                )
            else:
                tensors[info.name] = shard(info).to(dtype)
        traffic, counted, buckets = Traffic(), _Counted(), layout.buckets(lambda _: False)
        with fake_world(mesh.rank(group, index), mesh.world_size):
            groups = store.make_communicators(layout, self._config)
            refresh = WeightRefresh(
                layout.refreshes, tensors, groups.refresh, traffic, dtype, counted,
                lambda name, _: _quantised(held[name].shape, copies.dtype), quantised,
            )  # fmt: skip
            trained = [name for name, parameter in held.items() if parameter.requires_grad]
            if self._sync is None:
                gradients = GradientSync(buckets, held, groups.holders, traffic, messages=counted)
                gradients.arm()
                gradients.finish()
                refresh.start([name for name, info in layout.parameters.items() if info.trainable])
                return [_mean(traffic, copies.refresh_every)]
            fragments = fragments_of(layout, self._sync.fragments)
            outer = OuterSteps(
                self._sync.model_copy(update={"offload": "none"}), buckets, lambda name: held[name].detach(), trained,
                fragments, groups.holders, counts=bool, counts_once=bool, device=torch.device("meta"), traffic=traffic,
                sum_over_ranks=lambda _: None, messages=counted,
            )  # fmt: skip
            found = []
            for fragment in range(self._sync.fragments):
                outer.start(fragment)
                outer.restart(None)
                refresh.start([name for name, other in fragments.items() if other == fragment])
                found.append(_mean(traffic, copies.refresh_every))
                traffic.reset()
            return found

    def _moved(self, ranks: tuple[int, ...], to: int) -> tuple[int, ...]:
        """Return the ranks with which ``to`` communicates, if another rank does so with ``ranks``.

        Coordinates in which ``ranks`` differ stay. The others become those of ``to``.
        """
        mesh, at = self._mesh, self._mesh.coordinates(to)
        inside = mesh.coordinates(ranks[0]).sdp == mesh.coordinates(ranks[-1]).sdp
        key = ranks, at.sdp if inside else None, at.fsdp, at.tp
        if key not in self._moves:
            others = [mesh.coordinates(rank) for rank in ranks]
            fsdp, tp = {other.fsdp for other in others}, {other.tp for other in others}
            self._moves[key] = tuple(
                mesh.rank(
                    at.sdp if inside else other.sdp,
                    at.fsdp if len(fsdp) == 1 else other.fsdp,
                    at.tp if len(tp) == 1 else other.tp,
                )
                for other in others
            )
        return self._moves[key]


@cache
def _quantised(shape: torch.Size, kind: Kind) -> Sequence[torch.Tensor]:
    """Return the tensors of a quantised copy. Most blocks have copies of equal shapes."""
    return quantise(torch.empty(shape, device="meta"), kind)


@cache
def _nbytes(shape: torch.Size, compression: Compression) -> int:
    """Return the bytes of a tensor in a message of the service. Empty shards are not sent."""
    message = encode([(Slice("", (), ()), torch.empty(shape, device="meta"), compression)])
    return sum(tensor.nbytes for tensor in message.values()) if shape.numel() else 0


def _mean(traffic: Traffic, refresh_every: int) -> Counter[Among]:
    """Return what was counted, with the mean of the steps for broadcasts to frozen copies."""
    sent = traffic.buffers.items()
    return Counter({key: nbytes // refresh_every if key[1] == "broadcast" else nbytes for key, nbytes in sent})
