"""Access to FSDP2's internals: its collectives, which are counted, and its unreduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ...distributed.traffic import Traffic


class CountingAllGather(DefaultAllGather):
    """FSDP2's default all-gather, counted by the size of its output."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._traffic.record("inside groups", "all_gather", output_tensor.nbytes, group.size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountingReduceScatter(DefaultReduceScatter):
    """FSDP2's default reduce-scatter, counted by the size of its input."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        self._traffic.record("inside groups", "reduce_scatter", input_tensor.nbytes, group.size())
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def gather_stream(module: nn.Module) -> torch.Stream | None:
    """The CUDA stream on which FSDP2 reads the module's shards in forward.

    The stream runs ahead of the current stream and does not wait for it. None without CUDA, and
    before the first forward pass.
    """
    if not isinstance(module, FSDPModule) or not torch.cuda.is_available():
        return None
    # The first forward pass creates the stream.
    return getattr(module._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)


def drop_unreduced_gradients(module: FSDPModule) -> None:
    """Drop the unreduced gradients of the module's parameters.

    FSDP2 keeps them between micro-batches if gradients are reduced once per step.
    """
    for parameter in _parameters(module):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def zero_missing_gradients(root: nn.Module) -> None:
    """Give zeros to parameters below ``root`` that earlier micro-batches of this step did not use.

    With mixed precision, FSDP2 keeps the gradients of earlier micro-batches in float32. It fails if
    the last micro-batch uses a parameter for the first time, because that gradient is in compute
    precision.
    """
    for module in root.modules():
        for parameter in _parameters(module) if isinstance(module, FSDPModule) else ():
            if parameter.reduce_dtype is None or parameter.unsharded_accumulated_grad is not None:
                continue
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and whole.dtype != parameter.reduce_dtype:
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=parameter.reduce_dtype)


@contextmanager
def root_stays_gathered(root: nn.Module, *, reshards: bool, at_end: Callable[[], None]) -> Iterator[None]:
    """A context in which the root's own parameters stay gathered after a forward pass.

    ``reshards`` is whether they are sharded after a forward pass elsewhere. ``at_end`` shards them.
    """
    if not isinstance(root, FSDPModule):
        yield
        return
    root.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        root.set_reshard_after_forward(reshards, recurse=False)
        at_end()


def unreduced_gradients(module: FSDPModule) -> list[torch.Tensor]:
    """The gradients of the module's parameters that FSDP2 has not reduced yet."""
    kept = [parameter.unsharded_accumulated_grad for parameter in _parameters(module)]
    return [gradient for gradient in kept if gradient is not None]


class HiddenParameters:
    """Parameters below ``root`` that FSDP2 shall neither gather nor reduce for now.

    FSDP2 must know all sharded modules when it runs first, so this makes it look for them.
    """

    def __init__(self, root: FSDPModule, parameters: Iterable[nn.Parameter]):
        state = root._get_fsdp_state()
        state._lazy_init()
        hidden = {id(parameter) for parameter in parameters}
        self._changed: list[tuple[Any, list[Any], list[Any]]] = []  # owner, all of its parts, those that stay
        for each in state._state_ctx.all_states:
            for group in _groups_of(each):
                stay = [part for part in group.fsdp_params if id(part.sharded_param) not in hidden]
                if len(stay) < len(group.fsdp_params):
                    self._changed.append((group, group.fsdp_params, stay))

    def hide(self) -> None:
        for group, _, stay in self._changed:
            group.fsdp_params = stay

    def show(self) -> None:
        for group, everything, _ in self._changed:
            group.fsdp_params = everything


def _parameters(module: FSDPModule) -> list[Any]:
    return [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]


def parameter_groups(module: FSDPModule) -> list[Any]:
    return _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    # Since torch 2.13, a module may have several parameter groups.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
