"""Refuses passes of a sharded module that FSDP2 would follow wrongly, without an error or with one
about memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError, ModelError


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


# What this file reads or replaces of FSDP2's groups of parameters.
_NAMES = "post_backward finalize_backward fsdp_params reduce_grads _training_state".split()


class ModuleUses:
    """Watches the uses of one module.

    With several shards, all gradients of the module are reduced, those of unused parameters as
    zeros. FSDP2 leaves them out. If ranks use different parameters, it would add up the gradients
    of different ones, without an error.

    Args:
        module: The module, to which FSDP2 is applied.
        name: Its path. "" is the model itself.
        groups: FSDP2's groups of the module's parameters.
        sharded: Whether the module has several shards.

    Raises:
        ConfigError: This version of torch has another FSDP2.
    """

    def __init__(self, module: nn.Module, name: str, groups: Sequence[Any], *, sharded: bool):
        missing = [name for name in _NAMES for group in groups if not hasattr(group, name)]
        if missing:
            raise ConfigError(
                f"torch {torch.__version__}: FSDP2 has no {missing[0]}, which sdp needs; install the version of torch "
                "that README.md names as tested"
            )
        self.name, self.sharded = name, sharded
        self.is_used = False  # in the newest forward pass
        self._groups = groups
        self._forwards = 0  # with gradients, since the last backward pass
        self._held_back: list[Any] = []
        self._ended: list[Any] = []
        module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's own
        for group in groups:
            group.post_backward = partial(self._end, group, group.post_backward)

    @property
    def has_parameters(self) -> bool:
        """Whether FSDP2 gathers anything for the module. Frozen copies that are put aside are
        hidden.
        """
        return any(group.fsdp_params for group in self._groups)

    def begin_backward(self) -> None:
        """Prepare for a backward pass. FSDP2's settings must be those of the pass."""
        self._ended.clear()
        self._held_back = [group for group in self._groups if group.reduce_grads] if self._is_reduced_late() else []
        for group in self._held_back:
            group.reduce_grads = False

    def end_backward(self) -> None:
        """Reduce what was not reduced during the backward pass."""
        self._forwards = 0
        for group in self._held_back:
            group.reduce_grads = True
            group.post_backward()
            group.finalize_backward()

    def _is_reduced_late(self) -> bool:
        return not self.sharded and self._forwards > 1

    def _begin(self, *_: Any) -> None:
        self.is_used = True
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            self._forwards += 1
            self._ended.clear()  # the backward pass of another engine may have gone through the module
        elif any(group._training_state.name == "POST_BACKWARD" for group in self._groups):
            # A reentrant checkpoint runs the module again, and FSDP2 would not gather it.
            raise self._refusal()

    def _end(self, group: Any, reduce: Any) -> None:
        if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            return  # no pass has used the module yet, and FSDP2 would look for its gathered parameters
        if self.sharded and group.reduce_grads:
            if any(group is ended for ended in self._ended):
                raise self._refusal()
            self._ended.append(group)
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if whole.grad is None and parameter.unsharded_accumulated_grad is None and whole.requires_grad:
                    whole.grad = torch.zeros_like(whole)
        reduce()

    def _refusal(self) -> ModelError:
        stage = "use zero_optimization.stage 0, and " if self.sharded else ""
        return ModelError(
            f"{self.name or 'the model'} is used several times in one backward pass, and its gradient is complete only "
            f"after the last use; {stage}pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )


@contextmanager
def nothing_left_out(uses: Sequence[ModuleUses]) -> Iterator[None]:
    """A context for a forward pass that shall use every sharded module.

    The ranks of a group gather and reduce in the order of their passes. If they left out different
    modules, as layer drop does, FSDP2 would mix the parameters of different ones, without an error.

    Raises:
        ModelError: The pass left out a module.
    """
    for each in uses:
        each.is_used = False
    yield
    left_out = [each for each in uses if each.sharded and each.has_parameters and not each.is_used]
    if left_out and len(left_out) < len(uses):
        raise ModelError(
            f"a forward pass left out {left_out[0].name!r}, and the ranks of a group gather sharded parameters "
            "together; run all blocks in each pass, or use zero_optimization.stage 0"
        )
