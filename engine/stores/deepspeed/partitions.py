"""Where ZeRO puts a unit's elements, and which ranks hold the same interval.

Each of DeepSpeed's parameter groups is a *bundle*: the parameters of one unit. ZeRO 1 and 2 join a
bundle's parameters end to end and partition the result. ZeRO 3 partitions every parameter by
itself. Either way, a rank has intervals of the bundle, and the rank at the same position in each
other holder has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...distributed.mesh import Holders, Mesh
from ...placement.layout import Layout

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
    """A stretch that one rank of every holder has, from ``at`` in its flat partition."""

    ranks: tuple[int, ...]
    at: int
    length: int


def stretches(bundle: Bundle, stage: int, mesh: Mesh) -> list[Shared]:
    """Return the stretches of the bundle without padding, by position in the group."""
    result: list[Shared] = []
    for index in range(mesh.fsdp):
        ranks = tuple(mesh.rank(group, index) for group in bundle.holders)
        for piece in pieces_of(bundle, stage, mesh.fsdp, index):
            last = result[-1] if result else None
            if last is not None and (last.ranks, last.at + last.length) == (ranks, piece.at):
                result[-1] = Shared(ranks, last.at, last.length + piece.length)
            else:
                result.append(Shared(ranks, piece.at, piece.length))
    return result


def rank_sets(bundles: Sequence[Bundle], stage: int, mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks of each communicator that the bundles need, in the same order on all ranks."""
    return sorted(
        {stretch.ranks for bundle in bundles for stretch in stretches(bundle, stage, mesh) if len(stretch.ranks) > 1}
    )
