"""The formats in which the holders of a unit send the changes of its weights (local steps).

- "none": float32, summed by an all-reduce.
- "bf16": bfloat16, summed by an all-reduce.
- "int8": integers with one float32 scale per row. An all-reduce cannot add integers of different
  scales, so every holder gathers the integers of all holders and adds them in one order. So all
  holders get the same bits. The difference between a change and what was sent of it is the holder's
  error. It adds the error to its next change (error feedback, arXiv 1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..distributed.tensor_collectives import all_gather_single
from ..distributed.traffic import Traffic
from .gradients import AllReduce

Compression = Literal["none", "bf16", "int8"]
LARGEST = 127


class Exchange(Protocol):
    """A sum over the ranks of a communicator that is under way."""

    def wait(self) -> list[torch.Tensor]:
        """Return the sums, in the shapes of the tensors that were sent."""
        ...


class ReducedExchange:
    """Sums the tensors by one all-reduce in ``dtype``."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        traffic: Traffic,
        all_reduce: AllReduce,
    ):
        self._shapes = [tensor.shape for tensor in tensors]
        self._buffer = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
        self._work: Any = None
        if self._buffer.numel():
            traffic.record("between groups", "all_reduce", self._buffer.nbytes, dist.get_world_size(group))
            self._work = all_reduce(self._buffer, group)

    def wait(self) -> list[torch.Tensor]:
        if self._work is not None:
            self._work.wait()
        flat = self._buffer.float()
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class GatheredExchange:
    """Gathers the tensors of all ranks as integers with scales, and adds them in rank order.

    ``errors`` become the differences between the tensors and what is sent.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        errors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        traffic: Traffic,
    ):
        self._shapes = [tensor.shape for tensor in tensors]
        self._ranks = dist.get_world_size(group)
        integers, scales = [], []
        for tensor, error in zip(tensors, errors, strict=True):
            rows, scale = quantise(tensor)
            error.copy_(tensor - restore(rows, scale, tensor.shape))
            integers.append(rows.reshape(-1))
            scales.append(scale)
        self._sizes = [len(scale) for scale in scales]
        mine, own_scales = torch.cat(integers), torch.cat(scales)
        self._works: list[Any] = []
        self._integers = mine.new_empty((self._ranks, len(mine)))
        self._scales = own_scales.new_empty((self._ranks, len(own_scales)))
        for all_of, part in ((self._integers, mine), (self._scales, own_scales)):
            if part.numel():
                traffic.record("between groups", "all_gather", all_of.nbytes, self._ranks)
                work = all_gather_single(all_of.view(-1), part, group=group, async_op=True)
                self._works.append((work, part))  # the part must live until it is sent

    def wait(self) -> list[torch.Tensor]:
        for work, _ in self._works:
            work.wait()
        totals = [torch.zeros(shape, device=self._scales.device) for shape in self._shapes]
        for integers, scales in zip(self._integers, self._scales, strict=True):
            parts = integers.split([shape.numel() for shape in self._shapes])
            for total, part, scale in zip(totals, parts, scales.split(self._sizes), strict=True):
                total += restore(part, scale, total.shape)
        return totals


def quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor as integers of shape (rows, columns), and the scale of each row.

    A tensor with fewer than two dimensions is one row.
    """
    rows = _rows(tensor)
    scales = rows.abs().amax(dim=1) / LARGEST if rows.numel() else rows.new_zeros(len(rows))
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / divisors[:, None]).round().to(torch.int8), scales


def restore(integers: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the float32 tensor of :func:`quantise`."""
    if not shape.numel():
        return torch.zeros(shape, device=scales.device)
    return (integers.view(len(scales), -1).float() * scales[:, None]).view(shape)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 and tensor.numel() else tensor.reshape(1, -1)


def rounded(tensor: torch.Tensor, error: torch.Tensor | None, compression: Compression) -> torch.Tensor:
    """Return ``tensor`` as the other holders receive it. Updates ``error`` for "int8"."""
    if compression == "bf16":
        return tensor.bfloat16().float()
    if compression == "int8":
        assert error is not None
        sent = restore(*quantise(tensor), tensor.shape)
        error.copy_(tensor - sent)
        return sent
    return tensor


def sent_nbytes(shape: Sequence[int], compression: Compression) -> int:
    """Return the bytes of one tensor in the format of ``compression``."""
    numel = torch.Size(shape).numel()
    if compression == "int8":
        rows = (shape[0] if len(shape) > 1 else 1) if numel else 1
        return numel + 4 * rows
    return numel * (2 if compression == "bf16" else 4)
