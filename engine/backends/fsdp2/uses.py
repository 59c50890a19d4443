"""Modules that a forward pass applies several times, such as the block of ALBERT.

autograd adds up the gradients of all uses, and has the sum after the last use in backward. FSDP2
would reduce after each use: zeros first, and then the sum. So a module's gradients are reduced
after its last use only.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...batch.call import tensors_in
from ...errors import ConfigError

# What this file reads or replaces of FSDP2's groups of parameters.
_NAMES = (
    "_register_post_backward_hook post_backward finalize_backward fsdp_params reduce_grads reshard_after_backward "
    "_reshard_after_forward"
).split()


class _Use:
    """One use of a module. It lives as long as the graph of its forward pass."""


class TrainingPass:
    """Whether the newest forward pass of a model is one with gradients.

    Inside such a pass, a reentrant checkpoint runs modules without gradients. Backward runs them
    again.
    """

    def __init__(self, model: nn.Module):
        self.has_gradients = False
        model.register_forward_pre_hook(self._note, prepend=True)

    def _note(self, *_: Any) -> None:
        self.has_gradients = torch.is_grad_enabled()


class ModuleUses:
    """Counts the uses of a module, and makes FSDP2 reduce its gradients once, after the last use.

    All gradients of the module are reduced, those of unused parameters as zeros. FSDP2 leaves them
    out. If ranks use different parameters, it would add up the gradients of different ones, without
    an error.

    A reentrant checkpoint hides the uses inside it from autograd until backward runs them again.
    Then FSDP2 sees the end of the first of them only, and would keep the gradients of the others
    for the next step.

    Args:
        group: FSDP2's group of the module's parameters.
        newest: the newest forward pass of the model.

    Raises:
        ConfigError: This version of torch has another FSDP2.
    """

    def __init__(self, group: Any, newest: TrainingPass):
        missing = [name for name in _NAMES if not hasattr(group, name)]
        if missing:
            raise _unsupported(f"has no {missing[0]}")
        self._group, self._newest = group, newest
        self._hidden = 0  # uses inside reentrant checkpoints that backward has not begun to run again
        self._expected = weakref.WeakSet[_Use]()  # uses that backward has not reached yet
        self._ends_with_pass = False  # a use whose inputs need no gradient: FSDP2 sees its end with that of the pass
        self._held_back = False
        self._note, self._reduce = group._register_post_backward_hook, group.post_backward
        group._register_post_backward_hook, group.post_backward = self._begin_use, self._end_use

    def _begin_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._note(args, kwargs)
        if not torch.is_grad_enabled():
            self._hidden += self._newest.has_gradients
        else:
            if self._hidden and torch._C._current_graph_task_id() != -1:  # inside backward
                self._hidden -= 1
            node = next(filter(None, map(_node_of, tensors_in((args, kwargs)))), None)
            if node is None:
                if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
                    raise _unsupported("marks the inputs of modules in another way")
                self._ends_with_pass = True
            else:
                node.metadata["use"] = use = _Use()
                self._expected.add(use)
        return args, kwargs

    def _end_use(self, *_: Any) -> None:
        in_graph = bool(self._expected)
        if in_graph:
            self._expected.pop()
        self._held_back = False
        if not all(hasattr(parameter, "_unsharded_param") for parameter in self._group.fsdp_params):
            return  # no pass has used the module yet, and FSDP2 would look for its gathered parameters
        if not (self._expected or self._hidden or (in_graph and self._ends_with_pass)):
            self._reduce_all()
            return
        # Before its last use, the module is sharded as after a use in forward.
        group = self._group
        reduces, reshards = group.reduce_grads, group.reshard_after_backward
        group.reduce_grads, group.reshard_after_backward = False, reshards and group._reshard_after_forward
        try:
            self._reduce()
        finally:
            group.reduce_grads, group.reshard_after_backward = reduces, reshards
        self._held_back = reduces

    def end_pass(self) -> None:
        """Reduce what waits for uses that the backward pass did not reach.

        They belong to a forward pass whose output is still alive, but not part of the loss. Or they
        are inside reentrant checkpoints.
        """
        self._ends_with_pass = False
        if self._group.reduce_grads:
            self._hidden = 0
        if self._held_back:
            self._held_back = False
            self._reduce_all()
            self._group.finalize_backward()

    def _reduce_all(self) -> None:
        """Reduce the gradients of all parameters that were gathered."""
        for parameter in self._group.fsdp_params if self._group.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or whole.grad is not None or parameter.unsharded_accumulated_grad is not None:
                continue
            if whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
        self._reduce()


def _unsupported(problem: str) -> ConfigError:
    return ConfigError(
        f"torch {torch.__version__}: FSDP2 {problem}, which sdp needs; install the version of torch that README.md "
        "names as tested"
    )


def _node_of(value: Any) -> Any:
    """The node of autograd at which FSDP2 sees the end of a use, if ``value`` has passed one."""
    node = value.grad_fn if isinstance(value, torch.Tensor) else None
    return node if node is not None and node.name().startswith("RegisterPostBackward") else None
