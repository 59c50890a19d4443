"""Blocks that train in the rows of some groups only: backward masking in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def freeze_rows(block: nn.Module, holders: Sequence[int], groups_of_rows: Callable[[], torch.Tensor | None]) -> None:
    """Make ``block`` run the rows of groups that do not hold it with weights that get no gradient.

    The outputs stay the same. Tensors that have one entry for each row in their first dimension are
    cut, others are passed on whole.

    Args:
        block: runs all rows. Its outputs have the rows in their first dimension.
        holders: the groups that hold it.
        groups_of_rows: returns the group of each row, or None if all weights train in this call.
    """
    plain, holds = _Plain(block), set(holders)

    def forward(*args: Any, **kwargs: Any) -> Any:
        groups = groups_of_rows()
        if groups is None:
            return plain(*args, **kwargs)
        holding = torch.tensor([group in holds for group in groups.tolist()], device=groups.device)
        trained, frozen = holding.nonzero().flatten(), (~holding).nonzero().flatten()
        weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        parts = []
        for rows, values in ((trained, {}), (frozen, weights)):
            own_args, own_kwargs = _take(rows, len(groups), (args, kwargs))
            parts.append(functional_call(plain, values, own_args, own_kwargs))
        return _merge(parts, torch.cat([trained, frozen]).argsort())

    block.forward = forward


class _Plain(nn.Module):
    """A block as it is now. Its ``forward`` may be replaced later, and its hooks run once for all
    rows.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _take(rows: torch.Tensor, count: int, tree: Any) -> Any:
    """Return ``tree`` with the ``rows`` of every tensor that has ``count`` of them."""

    def taken(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
        return leaf.index_select(0, rows) if has_rows else leaf

    return tree_map(taken, tree)


def _merge(parts: Sequence[Any], order: torch.Tensor) -> Any:
    """Join the outputs of both calls, with their rows in ``order``."""
    first, structure = tree_flatten(parts[0])
    second, _ = tree_flatten(parts[1])
    joined = [
        torch.cat([mine, other]).index_select(0, order) if isinstance(mine, torch.Tensor) else mine
        for mine, other in zip(first, second, strict=True)
    ]
    return tree_unflatten(joined, structure)
