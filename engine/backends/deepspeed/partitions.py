"""Where ZeRO puts a unit's elements, and how holders average their shards.

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


@dataclass(frozen=True)
class Piece:
    """``length`` elements, from ``start`` in the parameter ``name`` and from ``at`` in the flat partition."""

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
        places = [by_group[group] for group in bundle.holders]
        new = Shared(tuple(place[0] for place in places), tuple(place[1] for place in places), places[0][2])
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
    """A stretch of a parameter that the rank ``source`` sends to the other ranks, for their frozen copies."""

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

    def _parts(self, refresh: Refresh, name: str) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup, int]]:
        for route in self._routes[name, refresh.source]:
            if self._rank in route.shared.ranks:
                at = route.shared.at[route.shared.ranks.index(self._rank)]
                part = self._parameters[name].detach().view(-1).narrow(0, at, route.shared.length)
                yield part, self._between[route.shared.ranks], route.shared.ranks.index(route.source)


class ShardSync:
    """Averages the reduced gradients of one rank's partitions with the other holders.

    It counts each element once in the gradient norm. All-reduces are asynchronous: those of a unit
    overlap with the preparation and the all-reduces of the next ones.

    ``here`` gives the index on this rank of every bundle of the full model, or None. ``groups`` are
    communicators by their ranks.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        here: Sequence[int | None],
        stage: int,
        mesh: Mesh,
        rank: int,
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        traffic: Traffic,
        all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], Any],
    ):
        self._traffic, self._all_reduce = traffic, all_reduce
        self._groups, self._rank = groups, rank
        # By index, in the order of launch, which is the same on all ranks.
        self._plan: dict[int, tuple[float, list[tuple[int, Shared]]]] = {}
        self._works: list[Any] = []
        for bundle, index in reversed(list(zip(bundles, here, strict=True))):  # in the order of backward
            if index is None:
                continue
            weight = mesh.size(mesh.coordinates(rank).sdp) / mesh.data_ranks_of(bundle.holders)
            mine = [(s.at[s.ranks.index(rank)], s) for s in stretches(bundle, stage, mesh) if rank in s.ranks]
            self._plan[index] = (weight, mine)

    @property
    def order(self) -> list[int]:
        """Indices in the order in which all ranks launch."""
        return list(self._plan)

    def launch(self, index: int, gradient: torch.Tensor) -> None:
        """Start to average a bundle's reduced gradient over all data ranks of the holders, in place."""
        weight, mine = self._plan[index]
        if weight != 1.0:
            gradient.mul_(weight)
        for at, stretch in mine:
            if len(stretch.ranks) > 1:
                part = gradient.narrow(0, at, stretch.length)
                self._traffic.record("between groups", "all_reduce", part.nbytes, len(stretch.ranks))
                self._works.append(self._all_reduce(part, self._groups[stretch.ranks]))

    def finish(self) -> None:
        """Wait for all launched all-reduces."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def abandon(self) -> None:
        """Forget launched all-reduces without waiting, because another rank may have failed."""
        self._works.clear()

    def counted(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of the averaged gradients that this rank, and no other, counts in the global norm."""
        return [
            gradients[index].narrow(0, at, stretch.length)
            for index, (_, mine) in self._plan.items()
            for at, stretch in mine
            if stretch.ranks[0] == self._rank
        ]

    def plan(self, planned: Traffic) -> None:
        """Add the bytes that :meth:`launch` sends to ``planned``."""
        for _, mine in self._plan.values():
            for _, stretch in mine:
                planned.record("between groups", "all_reduce", 4 * stretch.length, len(stretch.ranks))


class EarlyLaunch:
    """Launches averages while backward still runs (ZeRO 3).

    A bundle is ready once its last partition is reduced inside the group. All ranks launch in the
    same order, so a ready bundle waits for those before it.
    """

    def __init__(
        self, sync: ShardSync, members: Sequence[Sequence[torch.Tensor]], numels: Sequence[int], device: torch.device
    ):
        """``members`` and ``numels``: parameters and partition size of each bundle, in partition order."""
        self._sync, self._numels, self._device = sync, numels, device
        self._place = {
            id(parameter): (index, place)
            for index, group in enumerate(members)
            for place, parameter in enumerate(group)
        }
        self._starts: list[list[int]] = []
        for group in members:
            sizes = [parameter.ds_tensor.numel() for parameter in group]  # type: ignore[attr-defined]
            self._starts.append([0, *itertools.accumulate(sizes)][:-1])
        self._missing: list[set[int]] | None = None
        self._flats: dict[int, torch.Tensor] = {}
        self._next = 0

    def arm(self) -> None:
        """Launch averages during the next backward pass, which is the last one before the step."""
        self._sync.finish()  # an earlier pass may have launched averages; this pass adds to its gradients
        self._missing, self._flats, self._next = [set(range(len(starts))) for starts in self._starts], {}, 0

    def ready(self, parameter: torch.Tensor, partition: torch.Tensor | None) -> None:
        """Take this rank's part of a reduced gradient (None if only padding); launch what is ready."""
        if self._missing is None:
            return
        index, place = self._place[id(parameter)]
        if not self._missing[index]:
            raise RuntimeError(
                "a gradient was reduced twice in one backward pass; recompute activations without reentrant checkpoints"
            )
        if index not in self._flats:
            self._flats[index] = torch.zeros(self._numels[index], dtype=torch.float32, device=self._device)
        if partition is not None:
            at = self._starts[index][place]
            self._flats[index][at : at + partition.numel()].copy_(partition.view(-1))
        self._missing[index].discard(place)
        order = self._sync.order
        while self._next < len(order) and not self._missing[order[self._next]]:
            self._sync.launch(order[self._next], self._flats[order[self._next]])
            self._next += 1

    def take(self) -> dict[int, torch.Tensor]:
        """Return the gradients of the launched bundles, by index, and reset."""
        launched = {index: self._flats[index] for index in self._sync.order[: self._next]}
        for flat in launched.values() if self._device.type == "cuda" else ():
            flat.record_stream(torch.cuda.current_stream())  # it was made on DeepSpeed's reduction stream
        self.drop()
        return launched

    def drop(self) -> None:
        """Reset after a failed backward pass, or after gradients were dropped."""
        self._missing, self._flats, self._next = None, {}, 0


def rank_sets(bundles: Sequence[Bundle], stage: int, mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks of each communicator that the bundles need, in the same order on all ranks."""
    return sorted(
        {stretch.ranks for bundle in bundles for stretch in stretches(bundle, stage, mesh) if len(stretch.ranks) > 1}
    )
