"""Refuses passes of a sharded module that FSDP2 would follow by half: its backward pass would fail
later, with an error about memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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
