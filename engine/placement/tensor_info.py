"""Describes each tensor of the full model: shape, holders, and how ranks divide the tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..distributed.mesh import Holders

QUANTISED_BLOCK = 64  # numbers of a row with the same scale


def quantised_row(numel: int, kind: str) -> tuple[int, int]:
    """Return the bytes of a row of ``numel`` quantised numbers, and the bytes of the row's scales.

    ``kind`` is "int8" or "nf4".
    """
    return numel if kind == "int8" else -(-numel // 2), 2 * -(-numel // QUANTISED_BLOCK)


@dataclass(frozen=True)
class Shard:
    """Says which shard of its group's parameters a rank holds.

    Attributes:
        count: number of shards into which the rows of each parameter are divided.
        index: the shard of this rank, 0 … ``count`` − 1.
        tp: the rank's number in tensor parallelism, which cuts parameters before the rows are
            divided.
    """

    count: int = 1
    index: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Cut:
    """The position of a slice (neurons of one unit) in a parameter of the full model.

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
    """Describes a parameter or persistent buffer of the full model, or a slice of a parameter.

    Tensor parallelism is applied first, and gives each tensor-parallel rank a part of the tensor.
    The ranks that shard a group's state then divide the rows of this part into shards.

    Attributes:
        name: the tensor's name. A slice has a name of its own.
        shape: shape of the tensor, or of the slice.
        dtype: data type in the full model.
        trainable: whether the tensor needs a gradient.
        unit: the name of the tensor's unit, or ``"shared"``.
        holders: the groups that hold the tensor.
        tp_dim: the dimension that is divided among the tensor-parallel ranks. None means that each
            of them has the whole tensor.
        tp: number of tensor-parallel ranks.
        cut: the position of a slice in its parameter. None if the tensor is not a slice.
        prefix: the start of ``name`` that is not in the path of the tensor in a group's module,
            such as ``paths.1.`` (``sdp.paths``).
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
        """The name of the tensor in the full model. A slice has the name of its parameter."""
        return self.cut.name if self.cut else self.name

    @property
    def path(self) -> str:
        """The path of the tensor in the uncut module. A slice has the path of its parameter."""
        return self.canonical.removeprefix(self.prefix)

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the tensor in the full model. For a slice, the shape of its parameter."""
        return self.cut.shape if self.cut else self.shape

    @property
    def numel(self) -> int:
        """Number of elements of the tensor, or of the slice, before it is divided among ranks."""
        return self.shape.numel()

    @property
    def tp_shape(self) -> torch.Size:
        """The shape of the part of the tensor that a tensor-parallel rank has."""
        return torch.Size(size // self.tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def offset(self, shard: Shard) -> tuple[int, ...]:
        """Return the indices in the full model's parameter at which ``shard`` begins."""
        start = [0] * len(self.shape)
        if self.cut is not None:
            start[self.cut.dim] = self.cut.start
        if self.tp_dim is not None:
            start[self.tp_dim] += shard.tp * self.tp_shape[self.tp_dim]
        if start:
            start[0] += self.shard_rows(shard.count, shard.index)[0]
        return tuple(start)

    def shard_rows(self, shards: int, index: int) -> tuple[int, int]:
        """Return the first row of shard ``index``, and the row after its last.

        The rows of a tensor-parallel rank's part are divided as in ``torch.chunk`` and FSDP2.
        """
        rows = self.tp_shape[0] if self.shape else 1
        size = -(-rows // shards)
        return min(rows, index * size), min(rows, (index + 1) * size)

    def shard_numel(self, shards: int, index: int) -> int:
        """Return the number of elements of the shard ``index``, if there are ``shards`` shards."""
        first, last = self.shard_rows(shards, index)
        return (last - first) * self.tp_shape[1:].numel()

    def copy_nbytes(self, kind: str, itemsize: int, shards: int = 1, index: int = 0) -> int:
        """Return the bytes of shard ``index`` of a frozen copy of this tensor.

        ``kind`` is ``sdp.copies.dtype``. ``itemsize`` is the bytes of a number in compute
        precision.
        """
        if not self.is_quantised(kind):
            return itemsize * self.shard_numel(shards, index)
        first, last = self.shard_rows(shards, index)
        return (last - first) * sum(quantised_row(self.tp_shape[1:].numel(), kind))

    def is_quantised(self, kind: str) -> bool:
        """Whether copies of this tensor are quantised if ``sdp.copies.dtype`` is ``kind``.

        Copies of tensors with fewer than two dimensions are never quantised.
        """
        return kind != "compute" and len(self.shape) >= 2 and self.dtype.is_floating_point

    def padded_shard_numel(self, shards: int) -> int:
        """Return the number of elements that a rank sends in a gather of the tensor's shards.

        For a gather, all shards are padded to the size of the first shard, which is the largest.
        """
        return self.shard_numel(shards, 0)
