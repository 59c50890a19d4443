"""Where ZeRO puts a unit's elements, and the average of shards among holders whose groups may have different numbers of ranks.

A parameter group of DeepSpeed's is a *bundle*: the parameters of one unit. ZeRO 1 and 2 lay a bundle's parameters end to end and cut
that; ZeRO 3 cuts every parameter by itself. Either way a rank has intervals of the bundle, and where groups of different sizes hold
one, these are cut further, so that each piece is on one rank of every holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import Holders, Mesh
from ..traffic import Traffic

ALIGNMENT = 2  # ZeRO 1 and 2 pad a group to this many times the ranks


@dataclass(frozen=True)
class Bundle:
    """Parameters of one unit that DeepSpeed partitions together: canonical names and numbers of elements, and who holds the unit.

    ``options``: index of the parameter group of the user's that they are of.
    """

    unit: str
    options: int
    holders: Holders
    names: tuple[str, ...]
    numels: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """``length`` elements: of the parameter ``name`` from ``start``, in this rank's flat partition from ``at``."""

    name: str
    start: int
    at: int
    length: int


def pieces_of(bundle: Bundle, stage: int, ranks: int, rank: int) -> list[Piece]:
    """What rank ``rank`` of ``ranks`` has of the bundle, padding left out."""
    pieces, base = [], 0
    size = partition_numel(bundle, stage, ranks)
    for name, numel in zip(bundle.names, bundle.numels, strict=True):
        if stage == 3:
            each = -(-numel // ranks)
            first, last, at = rank * each, min((rank + 1) * each, numel), base
            base += each
        else:  # the parameter is [base, base + numel) of the whole, the partition [rank·size, (rank + 1)·size)
            first, last = max(rank * size - base, 0), min((rank + 1) * size - base, numel)
            at = base + first - rank * size
            base += numel
        if first < last:
            pieces.append(Piece(name, first, at, last - first))
    return pieces


def partition_numel(bundle: Bundle, stage: int, ranks: int) -> int:
    """Elements of a rank's flat partition, padding included."""
    if stage == 3:
        return sum(-(-numel // ranks) for numel in bundle.numels)
    return -(-sum(bundle.numels) // (ALIGNMENT * ranks)) * ALIGNMENT


@dataclass(frozen=True)
class Shared:
    """A stretch of a bundle that one rank of every holder has; ``at``: where it begins in each rank's flat partition."""

    ranks: tuple[int, ...]
    at: tuple[int, ...]
    length: int


def stretches(bundle: Bundle, stage: int, mesh: Mesh) -> list[Shared]:
    """The bundle cut so that each stretch is on exactly one rank of every holder."""
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
        if last and last.ranks == new.ranks and all(at + last.length == then for at, then in zip(last.at, new.at, strict=True)):
            result[-1] = Shared(last.ranks, last.at, last.length + new.length)  # neighbours everywhere
        else:
            result.append(new)
    return result


class ShardSync:
    """Averages the reduced gradients of one rank's partitions with the other holders, and counts each element once in the norm.

    ``here``: for every bundle of the full model its index on this rank, or None; ``groups[ranks]``: a communicator.
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
        self._plan: list[tuple[int, float, list[tuple[int, Shared]]]] = []  # in one order on all ranks
        for bundle, index in zip(bundles, here, strict=True):
            if index is None:
                continue
            sizes = {group: len(mesh.ranks_of(group)) for group in bundle.holders}
            weight = sizes[mesh.coordinates(rank).sdp] / sum(sizes.values())
            mine = [(s.at[s.ranks.index(rank)], s) for s in stretches(bundle, stage, mesh) if rank in s.ranks]
            self._plan.append((index, weight, mine))

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Mean over all data ranks of the holders, in place; a unit's reduction runs while the next one's is being prepared."""
        works = []
        for index, weight, mine in self._plan:
            if weight != 1.0:
                gradients[index].mul_(weight)
            for at, stretch in mine:
                if len(stretch.ranks) > 1:
                    part = gradients[index].narrow(0, at, stretch.length)
                    self._traffic.record("between groups", "all_reduce", part.nbytes, len(stretch.ranks))
                    works.append(self._all_reduce(part, self._groups[stretch.ranks]))
        for work in works:
            work.wait()

    def counted(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of the averaged gradients that this rank counts in the global norm: one rank counts each element."""
        return [
            gradients[index].narrow(0, at, stretch.length)
            for index, _, mine in self._plan
            for at, stretch in mine
            if stretch.ranks[0] == self._rank
        ]

    def plan(self, planned: Traffic) -> None:
        """Add what :meth:`average` sends."""
        for _, _, mine in self._plan:
            for _, stretch in mine:
                planned.record("between groups", "all_reduce", 4 * stretch.length, len(stretch.ranks))


def rank_sets(bundles: Sequence[Bundle], stage: int, mesh: Mesh) -> list[tuple[int, ...]]:
    """The communicators that all bundles need, in one order on all ranks."""
    return sorted({stretch.ranks for bundle in bundles for stretch in stretches(bundle, stage, mesh) if len(stretch.ranks) > 1})
