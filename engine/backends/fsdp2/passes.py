"""Refuses passes of a sharded module that FSDP2 would follow wrongly, without an error or with one
about memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...distributed.traffic import Traffic
from ...errors import ModelError
from .collectives import parameter_groups


class GatherOrder:
    """Compares the order in which the ranks that share parameters gather modules in a forward pass.

    If ranks leave out different modules, as layer drop does, FSDP2 gathers the parameters of
    different ones together, without an error. If they leave out different numbers of modules, its
    collectives fail.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, traffic: Traffic):
        """Start.

        Args:
            group: The ranks that share parameters. None if each rank has whole ones.
            device: Where messages are.
            traffic: Counts the bytes of messages.
        """
        self._group, self._device, self._traffic = group, device, traffic
        self._modules: dict[str, nn.Module] = {}
        self._order: list[str] = []

    def noting(self, name: str, module: nn.Module) -> Callable[[], None]:
        """Return a function that notes that ``module`` is gathered."""
        self._modules[name] = module
        return lambda: self._order.append(name)

    @contextmanager
    def of_one_pass(self) -> Iterator[None]:
        """A context for one forward pass.

        It sends a message only if some modules were gathered and others were not.

        Raises:
            ModelError: On all ranks, if they gathered different modules.
        """
        self._order.clear()
        yield
        left_out = [name for name, module in self._modules.items() if name not in self._order and _is_sharded(module)]
        if self._group is None or not left_out or not self._order:
            return
        checksum = zlib.crc32("\n".join(self._order).encode())
        extremes = torch.tensor([checksum, -checksum], device=self._device)
        self._traffic.record("control", "all_reduce", extremes.nbytes, self._group.size())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        if int(extremes.sum()):
            raise ModelError(
                f"the ranks of a group ran different blocks in one pass (this one left out {left_out[0]!r}), and they "
                "gather sharded parameters together; leave out the same blocks on all ranks, or use "
                "zero_optimization.stage 0"
            )


def _is_sharded(module: nn.Module) -> bool:
    """Whether a pass of ``module`` would gather it. Frozen copies that are put aside are hidden."""
    assert isinstance(module, FSDPModule)
    hidden = not any(group.fsdp_params for group in parameter_groups(module))
    return not hidden and any(isinstance(parameter, DTensor) for parameter in module.parameters())


def refuse_hidden_results(module: nn.Module, name: str) -> None:
    """Make ``module`` raise ModelError if it returns tensors where FSDP2 does not look.

    FSDP2 gathers the parameters again when the gradient of a result arrives.

    Args:
        module: A sharded module.
        name: Its path. "" is the model itself.
    """

    def check(module: nn.Module, _: Any, result: Any) -> None:
        if not torch.is_grad_enabled() or isinstance(result, torch.Tensor):
            return
        seen = {id(tensor) for tensor in _tensors_that_fsdp_finds(result)}
        for leaf in tree_leaves(result):
            if any(id(tensor) not in seen for tensor in _tensors_inside(leaf)):
                raise ModelError(
                    f"{name or 'the model'} returns tensors in a {type(leaf).__name__}, where FSDP2 does not find "
                    "them; return a tensor, or tensors in a tuple, list or dict"
                )

    module.register_forward_hook(check)


def refuse_inference_mode(model: nn.Module) -> None:
    """Make a direct call of the sharded ``model`` in inference mode raise ModelError.

    FSDP2 would gather parameters into tensors that training cannot use. ``engine(batch)`` leaves
    the mode.
    """

    def check(*_: Any) -> None:
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "engine.module is called inside torch.inference_mode(), and FSDP2 could not train afterwards; call "
                "engine(batch), or use torch.no_grad()"
            )

    model.register_forward_pre_hook(check, prepend=True)


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError if a sharded parameter has a hook on its gradient, which never runs."""
    hooked = next((name for name, parameter in parameters.items() if parameter._backward_hooks), None)
    if hooked is not None:
        raise ModelError(
            f"parameter {hooked!r} has a hook, which FSDP2 does not run on a shard; use "
            "register_post_accumulate_grad_hook, or change the gradient inside the model"
        )


def refuse_whole_state(model: nn.Module) -> None:
    """Make ``load_state_dict`` of the sharded ``model`` raise ModelError for whole tensors."""

    def check(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                raise ModelError(
                    f"engine.module.load_state_dict: {name} is a shard here, and the state has it whole; load the "
                    "weights before sdp.initialize, or call engine.load_checkpoint"
                )

    model.register_load_state_dict_pre_hook(check)


def _tensors_that_fsdp_finds(result: Any) -> list[torch.Tensor]:
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors  # looks into dataclasses, too
    except ImportError:  # before torch 2.13
        return _tensors_of(tree_leaves(result))
    return list(collect_grad_tensors(result))


def _tensors_inside(leaf: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient in ``leaf``, or in its attributes."""
    return _tensors_of([leaf] if isinstance(leaf, torch.Tensor) else tree_leaves(getattr(leaf, "__dict__", None)))


def _tensors_of(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
