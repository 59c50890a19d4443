"""Gives a returning group its state: each unit from a living holder, in few messages, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..backends.fsdp2.backend import FSDP2Backend
from ..distributed import world
from ..distributed.tensors import local_tensor
from ..optim import optimizer_state
from ..optim.optimizer_state import OptimizerState
from ..placement.layout import Layout
from ..placement.units import SHARED

MESSAGE_BYTES = 64 * 2**20


def sources_of(layout: Layout, fresh: Sequence[int]) -> dict[tuple[int, int], list[str]]:
    """Return who sends which units: (source, receiver) → names of units.

    The units of a receiver are spread over their holders that have state. A unit without such a
    holder is not sent.

    Args:
        layout: the layout of the living groups.
        fresh: the groups without state, by their numbers in ``layout``.
    """
    messages: dict[tuple[int, int], list[str]] = {}
    named = [(SHARED, layout.everyone), *((unit.name, layout.placement.holders[unit.index]) for unit in layout.units)]
    for receiver in fresh:
        sent = dict.fromkeys((group for group in layout.everyone if group not in fresh), 0)
        for name, holders in named:
            ready = [group for group in holders if group not in fresh]
            if receiver in holders and ready:
                size = sum(info.part.numel() for info in layout.members.get(name, ()))
                source = min(ready, key=lambda group: (sent[group], group))
                sent[source] += size
                messages.setdefault((source, receiver), []).append(name)
    return messages


def has_state(backend: FSDP2Backend) -> bool:
    """Return whether the optimizer has made its state, which it does in its first step."""
    return bool(backend.basic_optimizer.state)


def prepare(backend: FSDP2Backend, *, with_state: bool) -> None:
    """Make the tensors that a group without state receives into."""
    backend.shard_parameters()
    optimizer_state.clear(backend.basic_optimizer)
    if with_state:
        backend.materialise_optimizer_state()


def exchange(backend: FSDP2Backend, fresh: Sequence[int]) -> int:
    """Send and receive all that groups without state need. Collective among the living ranks.

    Args:
        backend: the backend, connected to the living groups.
        fresh: the groups without state, by their numbers in its layout.

    Returns:
        The bytes that this rank sent or received.
    """
    layout, at, here = backend.layout, backend.at, backend.at.sdp
    state = OptimizerState(backend.basic_optimizer)
    moved, works, received = 0, [], []
    for (source, receiver), units in sorted(sources_of(layout, fresh).items()):
        if here not in (source, receiver):
            continue
        other = layout.mesh.rank(receiver if here == source else source, at.fsdp, at.tp)
        for tensors in _packs(_tensors_of(backend, state, units)):
            flat = torch.cat([_bytes_of(tensor) for tensor in tensors])
            moved += flat.numel()
            if here == source:
                works.append((dist.isend(flat, group_dst=other, group=world.group()), flat))
            else:
                works.append((dist.irecv(flat, group_src=other, group=world.group()), flat))
                received.append((tensors, flat))
    for work, _ in works:
        assert work is not None
        work.wait()
    for tensors, flat in received:
        parts = flat.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
    if received:
        state.write_back()
    return moved


def _tensors_of(backend: FSDP2Backend, state: OptimizerState, units: Sequence[str]) -> Iterator[torch.Tensor]:
    """Yield the local tensors of units in an order that is the same for all of their holders."""
    layout = backend.layout
    buffers = dict(backend.module.named_buffers())
    for unit in units:
        for info in layout.members.get(unit, ()):
            parameter = backend.parameters[info.name]
            yield local_tensor(parameter.detach())
            for _, value in sorted(state.of(parameter, info.canonical).items()):
                yield local_tensor(value)
        for name, info in layout.buffers.items():
            if info.unit == unit:
                yield buffers[name].detach()


def _packs(tensors: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in packs of about ``MESSAGE_BYTES``. Empty shards are left out."""
    pack: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        pack.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= MESSAGE_BYTES:
            yield pack
            pack, size = [], 0
    if pack:
        yield pack


def _bytes_of(tensor: Any) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
