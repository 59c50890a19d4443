"""Connects the native backend's parameters to the layer between groups."""

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
from ...sync.tensor_sums import TensorSums

ComesLast = Callable[[str], bool]  # whether the gradient of a parameter is ready only at the end of backward


def ends_in_root(layout: Layout, module: nn.Module, *, uses_fsdp: bool) -> ComesLast:
    """Return a function that says whether FSDP2 reduces a parameter at the end of backward.

    FSDP2 reduces the parameters of the root module there: those that no wrapped module has.

    Args:
        layout: the layout, whose blocks are wrapped.
        module: the model, which may name further modules that are wrapped.
        uses_fsdp: whether FSDP2 shards or casts the model at all.
    """
    wrapped = tuple(f"{name}." for name in (*get_sharding_groups(module), *layout.blocks))
    return lambda name: uses_fsdp and layout.parameters[name].unit == SHARED and not name.startswith(wrapped)


def make_sync(backend: SubnetworkBackend, comes_last: ComesLast, all_reduce: AllReduce) -> GradientSync:
    """Make the object that averages gradients among holders.

    Args:
        backend: gives the layout, the parameters and the process groups.
        comes_last: see :func:`ends_in_root`.
        all_reduce: starts an all-reduce.
    """
    return GradientSync(
        backend.layout.buckets(comes_last),
        backend.parameters,
        backend.communicators.holders,
        backend.traffic,
        clock=backend.clock,
        all_reduce=all_reduce,
    )


def make_inner_sync(backend: SubnetworkBackend, comes_last: ComesLast) -> GradientSync:
    """Make the object that averages the gradients of local steps, among this group's replicas only.

    The arguments are those of :func:`make_sync`.
    """
    holder_sets = {info.holders for info in backend.layout.parameters.values()}
    replicas = backend.communicators.replicas
    return GradientSync(
        backend.layout.buckets(comes_last),
        backend.parameters,
        dict.fromkeys(holder_sets, replicas) if replicas is not None else {},
        backend.traffic,
        clock=backend.clock,
        scope="inside groups",
    )


def make_tensor_sums(backend: SubnetworkBackend) -> TensorSums | None:
    """Make the object that sums gradients over tensor-parallel ranks, if a parameter needs it."""
    held = backend.layout.held(backend.at.sdp)
    whole = [backend.parameters[info.name] for info in held if info.trainable and info.tp_dim is None]
    ranks = backend.tensor_ranks
    return TensorSums(whole, ranks, backend.traffic) if whole and ranks is not None else None


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
        wait: waits for the weights of a block, and makes the given stream wait for them, too.
        stream_of: returns the stream on which FSDP2 gathers a module's shards, or None.
    """

    def waiting(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda block, _: wait(name, stream_of(block))

    for name in blocks:
        # This hook must run before FSDP2's own hook, which gathers the shards.
        module.get_submodule(name).register_forward_pre_hook(waiting(name), prepend=True)
