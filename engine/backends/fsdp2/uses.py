"""Modules that a forward pass applies several times, such as the block of ALBERT.

autograd adds up the gradients of all uses, and has the sum after the last use in backward. FSDP2
would reduce after each use: zeros first, and then the sum. So a module's gradients are reduced
after its last use only.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class _Use:
    """One use of a module. It lives as long as the graph of its forward pass."""


class ModuleUses:
    """Counts the uses of a module, and makes FSDP2 reduce its gradients after the last one.

    Args:
        group: FSDP2's group of the module's parameters.
    """

    def __init__(self, group: Any):
        self._group = group
        self._expected = weakref.WeakSet[_Use]()  # uses that backward has not reached yet
        self._ends_with_pass = False  # a use whose inputs need no gradient: FSDP2 sees its end with that of the pass
        self._held_back = False
        self._note, self._reduce = group._register_post_backward_hook, group.post_backward
        group._register_post_backward_hook, group.post_backward = self._begin_use, self._end_use

    def _begin_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._note(args, kwargs)
        if torch.is_grad_enabled():
            node = next(filter(None, map(_node_of, tree_leaves((args, kwargs)))), None)
            if node is None:
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
        if not (self._expected or (in_graph and self._ends_with_pass)):
            self._reduce()
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

        They belong to a forward pass whose output is still alive, but not part of the loss.
        """
        self._ends_with_pass = False
        if self._held_back:
            self._held_back = False
            self._reduce()
            self._group.finalize_backward()


def _node_of(value: Any) -> Any:
    """The node of autograd at which FSDP2 sees the end of a use, if ``value`` has passed one."""
    node = value.grad_fn if isinstance(value, torch.Tensor) else None
    return node if node is not None and node.name().startswith("RegisterPostBackward") else None
