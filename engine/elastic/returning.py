"""Gives a returning group its state: each unit from a living holder, in few messages, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..backends.sharded import ShardedBackend
from ..distributed import world
from ..distributed.mesh import Holders
from ..distributed.tensors import local_tensor
from ..engine import SDPEngine
from ..optim import optimizer_state
from ..optim.optimizer_state import HeldTensor, OptimizerState
from ..optim.param_groups import set_rates
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
    named = named_units(layout)
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


def named_units(layout: Layout) -> list[tuple[str, Holders]]:
    """Return the units, the shared part first, with their holders."""
    return [(SHARED, layout.everyone), *((unit.name, layout.placement.holders[unit.index]) for unit in layout.units)]


def has_state(backend: ShardedBackend) -> bool:
    """Return whether the optimizer has made its state, which it does in its first step."""
    return bool(backend.basic_optimizer.state)


def prepare(backend: ShardedBackend, *, with_state: bool) -> None:
    """Make the tensors that a group without state receives into."""
    backend.shard_parameters()
    optimizer_state.clear(backend.basic_optimizer)
    if with_state:
        backend.materialise_optimizer_state()


def exchange(backend: ShardedBackend, fresh: Sequence[int]) -> int:
    """Send and receive all that groups without state need. Collective among the living ranks.

    Args:
        backend: the backend, connected to the living groups.
        fresh: the groups without state, by their numbers in its layout.

    Returns:
        The bytes that this rank sent or received.
    """
    messages, state = sources_of(backend.layout, fresh), OptimizerState(backend.basic_optimizer)
    moved = transfer(backend, messages, lambda _, units: tensors_of_units(backend, units, state), copy_value)
    if backend.at.sdp in fresh:
        state.write_back()
    return moved


def facts_of(engine: SDPEngine, backend: ShardedBackend) -> dict[str, Any]:
    """Return the state of this rank that is not a tensor."""
    schedule = engine.lr_scheduler
    pairs = zip(engine.optimizer.param_groups, backend.names_of_param_groups(), strict=True)
    return {
        "has_state": has_state(backend),
        "rates": {name: float(group["lr"]) for group, members in pairs for name in members},
        "scheduler": backend.shared_schedule(schedule.state_dict()) if schedule is not None else None,
        "loss_scale": backend.loss_scale_state(),
        "spikes": engine.spikes.state_dict(),
        "loader": engine.loader.state_dict(),
        "steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "samples": engine.global_samples,
        "skipped": engine.skipped_steps,
        "skipped_in_a_row": engine.last_steps.skipped_in_a_row,
        "sync": engine.local_training.state_dict(engine.global_steps),
    }


def take_facts(
    engine: SDPEngine, backend: ShardedBackend, facts: Mapping[str, Any], rates: Mapping[str, float]
) -> None:
    """Continue as a group of which :func:`facts_of` returned ``facts``.

    Args:
        engine: the engine of a group without state.
        backend: its backend.
        facts: those of any group with state.
        rates: the learning rates of all parameters, by name.
    """
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(backend.shared_schedule(facts["scheduler"]))
    set_rates(engine.optimizer, backend.names_of_param_groups(), rates)
    backend.load_loss_scale(facts["loss_scale"])
    engine.spikes.load_state_dict(facts["spikes"])
    engine.loader.load_state_dict(facts["loader"])
    engine.global_steps, engine.global_samples = facts["steps"], facts["samples"]
    engine.micro_steps = facts["micro_steps"]
    engine.last_steps.start_at(facts["skipped"], facts["skipped_in_a_row"])
    backend.continue_at(steps=facts["steps"], micro_steps=facts["micro_steps"], skipped=facts["skipped"])
    if facts["sync"] is not None:
        engine.local_training.load_state_dict(facts["sync"], facts["steps"], in_round=False)


def copy_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Put a received value into a tensor."""
    tensor.copy_(value)


def received_here(
    backend: ShardedBackend, messages: Mapping[tuple[int, int], list[str]]
) -> list[tuple[tuple[int, int], list[str]]]:
    """Return the messages to this group, in the order of their sources."""
    return [(way, units) for way, units in sorted(messages.items()) if way[1] == backend.at.sdp]


def transfer(
    backend: ShardedBackend,
    messages: Mapping[tuple[int, int], list[str]],
    tensors_of: Callable[[int, Sequence[str]], Iterable[torch.Tensor]],
    take: Callable[[torch.Tensor, torch.Tensor], None],
) -> int:
    """Send and receive tensors of units. Collective among the living ranks.

    Args:
        backend: the backend, connected to the living groups.
        messages: the units by source and receiver.
        tensors_of: returns this rank's tensors of some units of a source, in an order that is the
            same for both ranks.
        take: puts a received value into a tensor of this rank. It is called in the order of the
            sources.

    Returns:
        The bytes that this rank sent or received.
    """
    layout, at, here = backend.layout, backend.at, backend.at.sdp
    moved, works, received = 0, [], []
    for (source, receiver), units in sorted(messages.items()):
        if here not in (source, receiver):
            continue
        other = layout.mesh.rank(receiver if here == source else source, at.fsdp, at.tp)
        for tensors in packs(tensors_of(source, units)):
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
            take(tensor, part.clone().view(tensor.dtype).view(tensor.shape))
    return moved


def tensors_of_units(
    backend: ShardedBackend, units: Sequence[str], state: OptimizerState | None
) -> Iterator[torch.Tensor]:
    """Yield the local tensors of units in an order that is the same for all of their holders."""
    buffers = dict(backend.module.named_buffers())
    for unit in units:
        for held in backend.held_of(unit):
            yield held.weights
            if state is not None:
                yield from state_tensors(state, held)
        for name, info in backend.layout.buffers.items():
            if info.unit == unit:
                yield buffers[name].detach()


def state_tensors(state: OptimizerState, held: HeldTensor) -> Iterator[torch.Tensor]:
    """Yield the local tensors of the optimizer's state, in the order of their keys."""
    for _, value in sorted(state.of(held.owner, held.canonical, held.group).items()):
        yield local_tensor(value)


def packs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
