"""Persistent buffers agree by the rule of gradients: those of a unit are means over the ranks of its holders, of the shared part over all.

Every rank tracks its own (batch norm's running statistics) while it trains; they become means where they are read or kept: evaluation,
full state, checkpoint. That is what averaging after every step would give: no step reads them, and an update,
(1 − m) · old + m · the batch's, is linear in them. Ranks that run a unit without holding it (frozen copies), and entries of neurons that
a group lacks, get the holders' mean and count for nothing in it. Buffers that are not floating (counts of batches) are the first
holder's first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..placement.layout import Layout
from .backend_view import SubnetworkBackend


def persistent_buffers(module: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Those that are here, by canonical name, not seen by autograd: a backward pass may still be to come."""
    return {name: buffer.data for name, buffer in module.named_buffers() if name in layout.buffers}


def held_entries(layout: Layout, group: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Of every floating buffer of the full model which entries are of units that ``group`` holds, or shared; of its shape."""
    floating = ((name, info) for name, info in layout.buffers.items() if info.dtype.is_floating_point)
    held = {name: torch.full(info.shape, group in info.holders, device=device) for name, info in floating}
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        for part in unit.buffers:
            ((first, last),) = part.ranges
            held[part.parameter][first:last] = group in holders
    return held


class BufferMean:
    """Means of floating buffers over the ranks that hold an entry, summed in float64: equal values stay as they are."""

    def __init__(self, layout: Layout, device: torch.device):
        shapes = {name: info.shape for name, info in layout.buffers.items() if info.dtype.is_floating_point}
        self._shapes = shapes
        total = sum(shape.numel() for shape in shapes.values())
        self._sums = torch.zeros((2, total), dtype=torch.float64, device=device)  # of the values, and how many

    def add(self, buffers: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
        """Count a rank's, where its group holds them (:func:`held_entries`)."""
        for name, sums in zip(self._shapes, self._split(), strict=True):
            if name in buffers:
                counts = held[name].view(-1)
                sums[0] += buffers[name].reshape(-1).double().masked_fill(~counts, 0)  # not times 0: it may be infinite
                sums[1] += counts

    def over(self, all_reduce: Callable[[torch.Tensor], None]) -> BufferMean:
        """Of all ranks, by a sum of float64 in place."""
        if self._sums.numel():
            all_reduce(self._sums)
        return self

    def give(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write the means into those that are here."""
        for (name, shape), sums in zip(self._shapes.items(), self._split(), strict=True):
            if name in buffers:
                buffers[name].copy_((sums[0] / sums[1]).view(shape))

    def _split(self) -> tuple[torch.Tensor, ...]:
        return self._sums.split([shape.numel() for shape in self._shapes.values()], dim=1)


def agree_on_buffers(backend: SubnetworkBackend) -> None:
    """Make persistent buffers of all ranks those of the full model, bit for bit the same wherever they are. Collective."""
    layout = backend.layout
    if layout.mesh.world_size == 1 or not layout.buffers:
        return
    here = persistent_buffers(backend.module, layout)
    mean = BufferMean(layout, backend.device)
    mean.add(here, held_entries(layout, backend.at.sdp, backend.device))
    mean.over(backend.all_reduce_control).give(here)
    _take_first_holders(backend, here)


def _take_first_holders(backend: SubnetworkBackend, here: Mapping[str, torch.Tensor]) -> None:
    """Buffers that are not floating, as bytes, of which all ranks but one add zeros."""
    others = {name: info for name, info in backend.layout.buffers.items() if not info.dtype.is_floating_point}
    if not others:
        return
    own = []
    for name, info in others.items():
        gives = backend.rank == backend.layout.mesh.rank(info.holders[0])
        value = here[name] if gives else torch.zeros(info.shape, dtype=info.dtype, device=backend.device)
        own.append(value.contiguous().view(-1).view(torch.uint8))
    total = torch.cat(own)
    backend.all_reduce_control(total)
    for (name, info), value in zip(others.items(), total.split([len(part) for part in own]), strict=True):
        if name in here:
            here[name].copy_(value.clone().view(info.dtype).view(info.shape))
