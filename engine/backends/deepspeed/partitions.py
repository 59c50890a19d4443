"""Where ZeRO puts a unit's elements, and which ranks hold the same interval.

Each of DeepSpeed's parameter groups is a *bundle*: the parameters of one unit. ZeRO 1 and 2 join a
bundle's parameters end to end and partition the result. ZeRO 3 partitions every parameter by
itself. Either way, a rank has intervals of the bundle. If groups of different sizes hold a unit,
the intervals are cut further, until each piece is on exactly one rank of every holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...distributed.mesh import Holders, Mesh
from ...distributed.traffic import Traffic, passes_on
from ...placement.buckets import Refresh
from ...placement.layout import Layout
from ...sync.weights import WeightRefresh

ALIGNMENT = 2  # ZeRO 1 and 2 pad a group to this many times the ranks


@dataclass(frozen=True)
class Bundle:
    """Parameters of one unit that DeepSpeed partitions together, by canonical name.

    ``options`` is the index of the user's parameter group to which they belong.
    """

    unit: str
    options: int
    holders: Holders
    names: tuple[str, ...]
    numels: tuple[int, ...]


def bundles_of(layout: Layout, param_groups: Sequence[Mapping[str, Any]]) -> list[Bundle]:
    """Return the parameters that DeepSpeed partitions together, in one order on all ranks.

    With several SDP groups, each of the user's parameter groups is split by unit. With one SDP
    group, the user's parameter groups stay as they are.
    """
    collected: dict[tuple[str, int], list[str]] = {}
    for options, group in enumerate(param_groups):
        for canonical in group["params"]:
            for info in layout.wholes[canonical]:
                if info.trainable:
                    unit = info.unit if layout.mesh.sdp > 1 else ""
                    collected.setdefault((unit, options), []).append(info.name)
    infos = layout.parameters
    bundles = [
        Bundle(
            infos[names[0]].unit,
            options,
            infos[names[0]].holders,
            tuple(names),
            tuple(infos[name].numel for name in names),
        )
        for (_, options), names in collected.items()
    ]
    order = {info.unit: index for index, info in reversed(list(enumerate(infos.values())))}
    return sorted(bundles, key=lambda bundle: order[bundle.unit]) if layout.mesh.sdp > 1 else bundles


@dataclass(frozen=True)
class Piece:
    """``length`` elements, from ``start`` in the parameter ``name`` and from ``at`` in the flat
    partition.
    """

    name: str
    start: int
    at: int
    length: int


def pieces_of(bundle: Bundle, stage: int, ranks: int, rank: int) -> list[Piece]:
    """The pieces of the bundle on rank ``rank`` of the ``ranks`` of a group, without padding."""
    pieces, base = [], 0
    size = partition_numel(bundle, stage, ranks)
    for name, numel in zip(bundle.names, bundle.numels, strict=True):
        if stage == 3:
            each = -(-numel // ranks)
            first, last, at = rank * each, min((rank + 1) * each, numel), base
            base += each
        else:  # the parameter is [base, base + numel), the partition is [rank·size, (rank + 1)·size)
            first, last = max(rank * size - base, 0), min((rank + 1) * size - base, numel)
            at = base + first - rank * size
            base += numel
        if first < last:
            pieces.append(Piece(name, first, at, last - first))
    return pieces


def boxes(start: int, length: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a range of a tensor's elements, in memory order, into boxes.

    The range is [start, start + length) of a tensor of ``shape``. A box is (offsets, sizes,
    elements).
    """
    if len(shape) <= 1:
        yield ((start,) if shape else ()), ((length,) if shape else ()), length
        return
    row = torch.Size(shape[1:]).numel()
    while length:
        index, inside = divmod(start, row)
        if inside or length < row:
            part = min(length, row - inside)
            for offsets, sizes, numel in boxes(inside, part, shape[1:]):
                yield (index, *offsets), (1, *sizes), numel
        else:
            part = length // row * row
            yield (index, *(0 for _ in shape[1:])), (part // row, *shape[1:]), part
        start, length = start + part, length - part


def partition_numel(bundle: Bundle, stage: int, ranks: int) -> int:
    """Elements of a rank's flat partition, including padding. Stage 0 partitions nothing."""
    if stage == 0:
        return sum(bundle.numels)
    if stage == 3:
        return sum(-(-numel // ranks) for numel in bundle.numels)
    return -(-sum(bundle.numels) // (ALIGNMENT * ranks)) * ALIGNMENT


@dataclass(frozen=True)
class Shared:
    """A stretch that one rank of every holder has.

    It begins at ``at`` in each rank's flat partition.
    """

    ranks: tuple[int, ...]
    at: tuple[int, ...]
    length: int


def stretches(bundle: Bundle, stage: int, mesh: Mesh) -> list[Shared]:
    """Cut the bundle so that each stretch is on exactly one rank of every holder."""
    owners: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}  # (name, start) → group → (rank, at, length)
    cuts: dict[str, set[int]] = {name: {0, numel} for name, numel in zip(bundle.names, bundle.numels, strict=True)}
    held: list[tuple[int, int, Piece]] = []
    for group in bundle.holders:
        ranks = mesh.ranks_of(group)
        for index, rank in enumerate(ranks):
            for piece in pieces_of(bundle, stage, len(ranks), index):
                cuts[piece.name] |= {piece.start, piece.start + piece.length}
                held.append((group, rank, piece))
    for group, rank, piece in held:
        inside = sorted(cut for cut in cuts[piece.name] if piece.start <= cut <= piece.start + piece.length)
        for first, last in itertools.pairwise(inside):
            owners.setdefault((piece.name, first), {})[group] = (rank, piece.at + first - piece.start, last - first)
    result: list[Shared] = []
    order = {name: index for index, name in enumerate(bundle.names)}
    for _, by_group in sorted(owners.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        addresses = [by_group[group] for group in bundle.holders]
        new = Shared(
            tuple(address[0] for address in addresses), tuple(address[1] for address in addresses), addresses[0][2]
        )
        last = result[-1] if result else None
        if (
            last
            and last.ranks == new.ranks
            and all(at + last.length == then for at, then in zip(last.at, new.at, strict=True))
        ):
            result[-1] = Shared(last.ranks, last.at, last.length + new.length)  # neighbours on every rank
        else:
            result.append(new)
    return result


@dataclass(frozen=True)
class Route:
    """A stretch of a parameter that the rank ``source`` sends to the other ranks, for their frozen
    copies.
    """

    source: int
    shared: Shared

    def sent_by(self, rank: int) -> bool:
        """Whether ``rank`` is the source or forwards what it receives."""
        ranks = self.shared.ranks
        return rank in ranks and passes_on(ranks.index(rank), ranks.index(self.source), len(ranks))


def routes_of(name: str, numel: int, refresh: Refresh, stage: int, mesh: Mesh) -> list[Route]:
    """The routes of a parameter from its source group to groups with other numbers of ranks."""
    if stage < 3:  # every rank has the whole parameter
        source = mesh.rank(refresh.source)
        ranks = sorted(
            [source, *(rank for group in refresh.members if group != refresh.source for rank in mesh.ranks_of(group))]
        )
        return [Route(source, Shared(tuple(ranks), (0,) * len(ranks), numel))]
    pieces = stretches(Bundle("", 0, refresh.members, (name,), (numel,)), stage, mesh)
    return [Route(shared.ranks[refresh.members.index(refresh.source)], shared) for shared in pieces]


class RoutedRefresh(WeightRefresh):
    """Refreshes between groups of unequal size. ``between`` holds communicators by their ranks."""

    def __init__(
        self,
        refreshes: Sequence[Refresh],
        parameters: Mapping[str, torch.Tensor],
        routes: Mapping[tuple[str, int], Sequence[Route]],
        between: Mapping[tuple[int, ...], dist.ProcessGroup],
        rank: int,
        traffic: Traffic,
        dtype: torch.dtype,
        broadcast: Callable[[torch.Tensor, int, dist.ProcessGroup], Any],
    ):
        here = [
            r
            for r in refreshes
            if any(rank in route.shared.ranks for name in r.names for route in routes[name, r.source])
        ]
        communicators: Any = {(refresh.source, refresh.members): None for refresh in here}  # routes have their own
        super().__init__(here, parameters, communicators, traffic, dtype, broadcast)
        self._routes, self._between, self._rank = routes, between, rank

    def _parts(
        self, refresh: Refresh, name: str, weights: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup, int]]:
        for route in self._routes[name, refresh.source]:
            if self._rank in route.shared.ranks:
                at = route.shared.at[route.shared.ranks.index(self._rank)]
                part = self._weight(name, weights).view(-1).narrow(0, at, route.shared.length)
                yield part, self._between[route.shared.ranks], route.shared.ranks.index(route.source)


def rank_sets(bundles: Sequence[Bundle], stage: int, mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks of each communicator that the bundles need, in the same order on all ranks."""
    return sorted(
        {stretch.ranks for bundle in bundles for stretch in stretches(bundle, stage, mesh) if len(stretch.ranks) > 1}
    )
