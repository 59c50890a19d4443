"""One tensor of the full model: its shape, its holders, and which part of it a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..distributed.mesh import Holders


@dataclass(frozen=True)
class Shard:
    """Which of its parameters' elements a rank holds: rows ``index`` of ``count`` in the part of tensor-parallel rank ``tp``."""

    count: int = 1
    index: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Cut:
    """What a slice is: the indices from ``start`` along ``dim`` of the full model's parameter ``name``, of ``shape``."""

    name: str
    shape: torch.Size
    dim: int
    start: int


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or persistent buffer of the full model, or a slice of one (``cut``). ``unit`` is a unit's name or ``"shared"``.

    ``tp_dim``: the dimension along which it is cut among ``tp`` tensor-parallel ranks; None: each of them has all of it. A shard is what
    is left of a tensor-parallel part once its rows are cut among the ranks that shard a group's state.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    unit: str
    holders: Holders
    tp_dim: int | None = None
    tp: int = 1
    cut: Cut | None = None

    @property
    def canonical(self) -> str:
        """The full model's parameter that this is, or is a slice of."""
        return self.cut.name if self.cut else self.name

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the full model's parameter."""
        return self.cut.shape if self.cut else self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.shape.numel()

    @property
    def part(self) -> torch.Size:
        """Shape of a tensor-parallel rank's part."""
        return torch.Size(size // self.tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def offset(self, shard: Shard) -> tuple[int, ...]:
        """Where ``shard`` begins in the full model's parameter."""
        start = [0] * len(self.shape)
        if self.cut is not None:
            start[self.cut.dim] = self.cut.start
        if self.tp_dim is not None:
            start[self.tp_dim] += shard.tp * self.part[self.tp_dim]
        if start:
            start[0] += self.shard_rows(shard.count, shard.index)[0]
        return tuple(start)

    def shard_rows(self, shards: int, index: int) -> tuple[int, int]:
        """First and last (exclusive) row of shard ``index`` in its part: dimension 0 cut as ``torch.chunk`` and FSDP2 cut it."""
        rows = self.part[0] if self.shape else 1
        size = -(-rows // shards)
        return min(rows, index * size), min(rows, (index + 1) * size)

    def shard_numel(self, shards: int, index: int) -> int:
        """Elements of shard ``index``."""
        first, last = self.shard_rows(shards, index)
        return (last - first) * self.part[1:].numel()

    def padded_shard_numel(self, shards: int) -> int:
        """Elements of a shard as it travels in a gather: all shards padded to the first one's size."""
        return self.shard_numel(shards, 0)
