"""A tensor of the full model: its shape, its holders, and the part of it that a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..distributed.mesh import Holders

QUANTISED_BLOCK = 64  # numbers of a row with the same scale


def quantised_row(numel: int, kind: str) -> tuple[int, int]:
    """Return the bytes of a row of ``numel`` numbers in "int8" or "nf4", and of its scales."""
    return numel if kind == "int8" else -(-numel // 2), 2 * -(-numel // QUANTISED_BLOCK)


@dataclass(frozen=True)
class Shard:
    """Which part of a parameter's elements a rank holds.

    Attributes:
        count: number of shards into which the rows are divided.
        index: the shard of this rank, 0 … ``count`` − 1.
        tp: the tensor-parallel rank whose part is sharded.
    """

    count: int = 1
    index: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Cut:
    """The position of a slice in a parameter of the full model.

    Attributes:
        name: the name of the full model's parameter.
        shape: the shape of that parameter.
        dim: the dimension along which it is sliced.
        start: the first index of the slice along ``dim``.
    """

    name: str
    shape: torch.Size
    dim: int
    start: int


@dataclass(frozen=True)
class TensorInfo:
    """A parameter or persistent buffer of the full model, or a slice of one.

    Tensor parallelism is applied first, and gives each tensor-parallel rank a part. The ranks that
    shard a group's state then divide the rows of this part into shards.

    Attributes:
        name: the tensor's name. A slice has a name of its own.
        shape: shape of the tensor, or of the slice.
        dtype: data type in the full model.
        trainable: whether the tensor needs a gradient.
        unit: the name of its unit, or ``"shared"``.
        holders: the groups that hold it.
        tp_dim: the dimension that is divided among the tensor-parallel ranks. None means that each
            of them has the whole tensor.
        tp: number of tensor-parallel ranks.
        cut: the position of a slice in its parameter. None if the tensor is not a slice.
        prefix: the part of ``name`` before the tensor's path in a group's module. Groups may have
            tensors with different names at the same path.
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
    prefix: str = ""

    @property
    def canonical(self) -> str:
        """The name of the full model's parameter, also if this is only a slice of it."""
        return self.cut.name if self.cut else self.name

    @property
    def path(self) -> str:
        """The path of the tensor in the uncut module, also if this is only a slice of it."""
        return self.canonical.removeprefix(self.prefix)

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the full model's parameter."""
        return self.cut.shape if self.cut else self.shape

    @property
    def numel(self) -> int:
        """Number of elements of the tensor, or of the slice, before it is divided among ranks."""
        return self.shape.numel()

    @property
    def tp_shape(self) -> torch.Size:
        """Shape of the part of a tensor-parallel rank."""
        return torch.Size(size // self.tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def offset(self, shard: Shard) -> tuple[int, ...]:
        """Return the index in the full model's parameter at which ``shard`` begins."""
        start = [0] * len(self.shape)
        if self.cut is not None:
            start[self.cut.dim] = self.cut.start
        if self.tp_dim is not None:
            start[self.tp_dim] += shard.tp * self.tp_shape[self.tp_dim]
        if start:
            start[0] += self.shard_rows(shard.count, shard.index)[0]
        return tuple(start)

    def shard_rows(self, shards: int, index: int) -> tuple[int, int]:
        """Return the first and the last (exclusive) row of shard ``index`` in its part.

        Dimension 0 is divided in the same way as in ``torch.chunk`` and FSDP2.
        """
        rows = self.tp_shape[0] if self.shape else 1
        size = -(-rows // shards)
        return min(rows, index * size), min(rows, (index + 1) * size)

    def shard_numel(self, shards: int, index: int) -> int:
        """Return the number of elements of shard ``index``."""
        first, last = self.shard_rows(shards, index)
        return (last - first) * self.tp_shape[1:].numel()

    def copy_nbytes(self, kind: str, itemsize: int, shards: int = 1, index: int = 0) -> int:
        """Return the bytes of shard ``index`` of a frozen copy of this kind (``sdp.copies.dtype``).

        ``itemsize`` is that of compute precision.
        """
        if not self.is_quantised(kind):
            return itemsize * self.shard_numel(shards, index)
        first, last = self.shard_rows(shards, index)
        return (last - first) * sum(quantised_row(self.tp_shape[1:].numel(), kind))

    def is_quantised(self, kind: str) -> bool:
        """Whether copies of this kind are quantised. Only matrices are."""
        return kind != "compute" and len(self.shape) >= 2 and self.dtype.is_floating_point

    def padded_shard_numel(self, shards: int) -> int:
        """Return the number of elements of a shard in a gather.

        For a gather, all shards are padded to the size of the first shard.
        """
        return self.shard_numel(shards, 0)
