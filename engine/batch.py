"""How a batch is handed to a model, and what its loss and its number of targets are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .errors import DataError, ModelError

IGNORED_LABEL = -100  # torch's and Hugging Face's ignore_index


def call_model(module: nn.Module, batch: Any) -> Any:
    """``module`` on one batch: a mapping whose keys are arguments of ``forward`` is spread by name, a tuple or list of as many
    tensors as ``forward`` has parameters by position; anything else is the one argument.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if takes_any or set(batch) <= names:
            return module(**batch)
    elif isinstance(batch, tuple | list):
        required = [p for p in positional if p.default is p.empty]
        fits = len(batch) > 1 and len(required) <= len(batch) <= len(positional)
        if fits or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return module(*batch)
    return module(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar loss in what a model returned: itself, ``.loss``, ``["loss"]``, or the first scalar of a tuple."""
    if isinstance(output, torch.Tensor):
        if output.numel() == 1:
            return output.reshape(())
        raise ModelError(f"the model returned a tensor of shape {tuple(output.shape)} where a scalar loss is needed; give it the labels")
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list):
        loss = next((leaf for leaf in output if isinstance(leaf, torch.Tensor) and leaf.numel() == 1), None)
    if loss is None:
        raise ModelError(f"no loss was found in the {type(output).__name__} that the model returned; give it the labels")
    return loss.reshape(())


def target_count(batch: Any) -> int:
    """Targets in a batch, the weight of its mean loss: labels that are not ignored, else the elements of its last tensor."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise DataError(f"a batch of type {type(batch).__name__} holds no tensor")
        labels = tensors[-1]
    if labels.is_floating_point():
        return labels.numel()
    # A causal model shifts "labels" inside: the first position of a row is no target.
    shifted = labels[..., 1:] if isinstance(batch, Mapping) and "labels" in batch and labels.dim() > 1 else labels
    return int((shifted != IGNORED_LABEL).sum())


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on ``device``."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def split_rows(batch: Any, parts: int) -> list[Any]:
    """Cut every tensor of a batch into ``parts`` equal pieces along dimension 0; scalars and other leaves go to each piece."""

    def piece(index: int) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            if leaf.shape[0] % parts:
                raise DataError(f"a batch of {leaf.shape[0]} rows cannot be cut for {parts} workers; give a multiple of {parts} rows")
            rows = leaf.shape[0] // parts
            return leaf[index * rows : (index + 1) * rows]

        return tree_map(cut, batch)

    return [piece(index) for index in range(parts)]


def merge_outputs(outputs: list[Any]) -> Any:
    """What ``parts`` workers returned as one: scalars are averaged, tensors joined along dimension 0, other leaves are the first's."""

    def merge(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        return torch.stack(leaves).mean(0) if leaves[0].dim() == 0 else torch.cat(leaves)

    return tree_map(merge, *outputs) if len(outputs) > 1 else outputs[0]
