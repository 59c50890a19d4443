"""Refuses passes of a sharded module that FSDP2 would follow wrongly, without an error or with one
about memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...errors import ModelError


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
