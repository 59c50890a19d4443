"""What a block returns, so that a stand-in can return its input in the same form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

ASKS_FOR_WEIGHTS = "output_attentions"
NO_WEIGHTS = "a skipped block has no attention weights to return"


class Structure(NamedTuple):
    """What a block returns: a tree, the leaf that is its hidden state, and leaves that are inputs.

    ``others`` has the name of the input by the index of the leaf. Further leaves are None.
    ``has_weights``: whether attention weights are among these.
    """

    spec: TreeSpec
    position: int
    others: dict[int, str]
    has_weights: bool


def read_structure(
    output: Any, hidden: torch.Tensor, inputs: Mapping[str, Any], signature: inspect.Signature
) -> Structure | str:
    """Read from a block's ``output`` how a stand-in returns its input.

    Returns the reason if no stand-in can.
    """
    leaves, spec = tree_flatten(output)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return "returns no tensor"
    position = tensors[0]
    if leaves[position].shape != hidden.shape:
        return f"returns {tuple(leaves[position].shape)} from {tuple(hidden.shape)}"
    others: dict[int, str] = {}
    weights = 0
    for index, leaf in enumerate(leaves):
        if index != position and leaf is not None:
            name = next((name for name, value in inputs.items() if value is leaf and index in tensors), None)
            if name is not None:
                others[index] = name
            elif index in tensors and _are_attention_weights(leaf, hidden, signature):
                weights += 1
            else:
                return "returns more than its hidden state"
    if weights and inputs.get(ASKS_FOR_WEIGHTS):
        return f"{ASKS_FOR_WEIGHTS}: {NO_WEIGHTS}"
    return Structure(spec, position, others, bool(weights))


def _are_attention_weights(leaf: torch.Tensor, hidden: torch.Tensor, signature: inspect.Signature) -> bool:
    """Whether ``leaf`` is (batch, heads, tokens, keys), of a block that can be asked for it.

    Such blocks often return it without being asked.
    """
    if ASKS_FOR_WEIGHTS not in signature.parameters or leaf.dim() != 4 or hidden.dim() != 3:
        return False
    return (leaf.shape[0], leaf.shape[2]) == hidden.shape[:2]
