"""The layer between groups, as the native backend connects it to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...full_model.backend_view import SubnetworkBackend
from ...model_interface import get_sharding_groups
from ...placement.layout import Layout
from ...placement.units import SHARED
from ...sync.gradients import AllReduce, GradientSync

ComesLast = Callable[[str], bool]


def ends_in_root(layout: Layout, module: nn.Module, *, uses_fsdp: bool) -> ComesLast:
    """Return whether FSDP2 reduces a parameter at the end of backward, with the root's own ones."""
    wrapped = tuple(f"{name}." for name in (*get_sharding_groups(module), *layout.blocks))
    return lambda name: uses_fsdp and layout.parameters[name].unit == SHARED and not name.startswith(wrapped)


def make_sync(backend: SubnetworkBackend, comes_last: ComesLast, all_reduce: AllReduce) -> GradientSync:
    """Make what averages gradients among holders."""
    return GradientSync(
        backend.layout.buckets(comes_last),
        backend.parameters,
        backend.communicators.holders,
        backend.traffic,
        _partial(backend),
        backend.tensor_ranks,
        clock=backend.clock,
        all_reduce=all_reduce,
    )


def make_inner_sync(backend: SubnetworkBackend, comes_last: ComesLast) -> GradientSync:
    """Make what averages the gradients of local steps: among this group's replicas only."""
    holder_sets = {info.holders for info in backend.layout.parameters.values()}
    replicas = backend.communicators.replicas
    return GradientSync(
        backend.layout.buckets(comes_last),
        backend.parameters,
        dict.fromkeys(holder_sets, replicas) if replicas is not None else {},
        backend.traffic,
        _partial(backend),
        backend.tensor_ranks,
        clock=backend.clock,
        scope="inside groups",
    )


def _partial(backend: SubnetworkBackend) -> list[str]:
    """Name the parameters whose gradient is this tensor-parallel rank's share of a sum."""
    held = backend.layout.held(backend.at.sdp)
    return [info.name for info in held if info.trainable and info.tp_dim is None]


def await_weights(
    module: nn.Module,
    blocks: Iterable[str],
    wait: Callable[[str, torch.Stream | None], None],
    stream_of: Callable[[nn.Module], torch.Stream | None],
) -> None:
    """Let each of the blocks wait for its refreshed weights before it runs.

    Args:
        module: the model.
        blocks: the names of the blocks.
        wait: waits for the weights of a block. A stream that gathers them waits, too.
        stream_of: returns this stream.
    """

    def waiting(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda block, _: wait(name, stream_of(block))

    for name in blocks:
        # This hook must run before FSDP2's own hook, which gathers the shards.
        module.get_submodule(name).register_forward_pre_hook(waiting(name), prepend=True)
