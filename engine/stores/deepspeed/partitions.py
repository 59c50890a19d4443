"""Which elements of a unit are in which partition of ZeRO.

DeepSpeed gets one parameter group for each unit, called a *bundle*. ZeRO 1 and 2 join a bundle's
parameters end to end and partition the result. ZeRO 3 partitions every parameter by itself. All SDP
groups have the same number of ranks. So rank i of every holder has the same elements of a unit, and
these ranks can average their partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...distributed.mesh import Holders
from ...placement.layout import Layout
from ..store import Piece

ALIGNMENT = 2  # ZeRO 1 and 2 pad a group to this many times the ranks


@dataclass(frozen=True)
class Bundle:
    """The parameters of one unit that DeepSpeed partitions together.

    ``options`` is the index of the user's parameter group that has the parameters.
    """

    unit: str
    options: int
    holders: Holders
    names: tuple[str, ...]
    numels: tuple[int, ...]

    @property
    def key(self) -> str:
        """The key of the bundle's partition in :attr:`GroupStore.stepped`."""
        return self.names[0]


def bundles_of(layout: Layout, param_groups: Sequence[Mapping[str, Any]]) -> list[Bundle]:
    """Split the user's parameter groups by unit. The bundles have the same order on all ranks.

    With one SDP group the user's groups are not split, so the user's schedule fits them.
    """
    collected: dict[tuple[str, int], list[str]] = {}
    for options, group in enumerate(param_groups):
        for path in group["params"]:
            for info in layout.by_path[path]:
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


def untrained(layout: Layout, name: str) -> Bundle:
    """Return a :class:`Bundle` that has only the parameter ``name``, which is not trained."""
    info = layout.parameters[name]
    return Bundle(info.unit, 0, info.holders, (name,), (info.numel,))


def partition_numel(bundle: Bundle, stage: int, ranks: int) -> int:
    """Return how many elements of a bundle are in the partition of one rank, with padding."""
    if stage == 3:
        return sum(-(-numel // ranks) for numel in bundle.numels)
    return -(-sum(bundle.numels) // (ALIGNMENT * ranks)) * ALIGNMENT


def pieces_of(
    bundle: Bundle, flat: torch.Tensor, layout: Layout, *, stage: int, ranks: int, rank: int
) -> Iterator[Piece]:
    """Split one rank's partition into rectangular parts of the full model's parameters.

    ``flat`` is the partition of ``rank``, or a tensor of the same size, such as a moment. Padding
    is left out.
    """
    base, size = 0, partition_numel(bundle, stage, ranks)
    for name, numel in zip(bundle.names, bundle.numels, strict=True):
        if stage == 3:
            share = -(-numel // ranks)
            first, last, at = rank * share, min((rank + 1) * share, numel), base
            base += share
        else:  # the parameter is [base, base + numel), the partition is [rank·size, (rank + 1)·size)
            first, last = max(rank * size - base, 0), min((rank + 1) * size - base, numel)
            at = base + first - rank * size
            base += numel
        info = layout.parameters[name]
        for position, sizes, count in boxes(first, last - first, info.shape) if first < last else ():
            shift = [info.cut.start if info.cut is not None and dim == info.cut.dim else 0 for dim in range(len(sizes))]
            offset = tuple(a + b for a, b in zip(position, shift, strict=True))
            yield Piece(info, flat[at : at + count].view(sizes), offset)
            at += count


def boxes(start: int, length: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a range of a tensor's elements, counted in memory order, into rectangular boxes.

    Args:
        start: the first element of the range.
        length: the number of elements in the range.
        shape: the shape of the tensor.

    Yields:
        For each box: the index of the first element, the sizes, and the number of elements.
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
