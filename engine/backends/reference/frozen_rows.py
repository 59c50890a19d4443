"""Blocks that train in the rows of some groups only: backward masking in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten


class FrozenRows:
    """Runs a block so that its weights get no gradient from the rows of groups that lack it.

    The block runs twice: with the holders' rows, and with the other rows and detached weights. The
    outputs are the same as those of one run. An argument that has one entry for each row, in its
    first dimension, is cut accordingly. Other arguments are passed on whole.

    Args:
        block: runs all rows. Its outputs have the rows in their first dimension.
        holders: the groups that hold it.
        groups_of_rows: returns the group of each row, or None if all weights train in this call.
    """

    def __init__(self, block: nn.Module, holders: Sequence[int], groups_of_rows: Callable[[], torch.Tensor | None]):
        self._plain, self._holds, self._groups_of_rows = _Plain(block), set(holders), groups_of_rows
        self._learns = False
        # By the number of arguments: the lengths of their first dimensions in a call with fewer
        # rows, and which of them do not change with the number of rows.
        self._lengths: dict[int, list[int]] = {}
        self._fixed: dict[int, list[bool]] = {}
        block.forward = self._forward

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context in which a call with fewer rows shows which arguments have rows.

        A table of positions may happen to have as many entries as the batch has rows. But its
        length does not change with the number of rows.
        """
        self._learns = True
        try:
            yield
        finally:
            self._learns = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        groups = self._groups_of_rows()
        if groups is None:
            if self._learns:
                leaves = tree_flatten((args, kwargs))[0]
                self._lengths[len(leaves)] = [_length(leaf) for leaf in leaves]
            return self._plain(*args, **kwargs)
        holding = torch.tensor([group in self._holds for group in groups.tolist()], device=groups.device)
        trained, frozen = holding.nonzero().flatten(), (~holding).nonzero().flatten()
        weights = {name: parameter.detach() for name, parameter in self._plain.named_parameters()}
        parts = []
        for rows, values in ((trained, {}), (frozen, weights)):
            own_args, own_kwargs = self._take(rows, len(groups), (args, kwargs))
            parts.append(functional_call(self._plain, values, own_args, own_kwargs))
        return _merge(parts, torch.cat([trained, frozen]).argsort())

    def _take(self, rows: torch.Tensor, count: int, tree: Any) -> Any:
        """Return ``tree``, in which tensors with one entry for each of ``count`` rows are cut to
        ``rows``.
        """
        leaves, structure = tree_flatten(tree)
        if self._learns and len(leaves) in self._lengths:
            pairs = zip(leaves, self._lengths[len(leaves)], strict=True)
            self._fixed[len(leaves)] = [0 <= fewer == _length(leaf) for leaf, fewer in pairs]
        fixed = self._fixed.get(len(leaves), [False] * len(leaves))
        taken = [
            leaf.index_select(0, rows) if _length(leaf) == count and not is_fixed else leaf
            for leaf, is_fixed in zip(leaves, fixed, strict=True)
        ]
        return tree_unflatten(taken, structure)


def _length(leaf: Any) -> int:
    """The length of a tensor's first dimension, -1 for anything else."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else -1


class _Plain(nn.Module):
    """A block as it is now. Its ``forward`` may be replaced later, and its hooks run once for all
    rows.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _merge(parts: Sequence[Any], order: torch.Tensor) -> Any:
    """Join the outputs of both calls, with their rows in ``order``."""
    first, structure = tree_flatten(parts[0])
    second, _ = tree_flatten(parts[1])
    joined = [
        torch.cat([mine, other]).index_select(0, order) if isinstance(mine, torch.Tensor) else mine
        for mine, other in zip(first, second, strict=True)
    ]
    return tree_unflatten(joined, structure)
