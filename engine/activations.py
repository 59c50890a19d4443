"""Activation checkpointing of units: nothing, everything, or all but matrix products and attention is recomputed in backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

log = logging.getLogger("sdp")

# Expensive to recompute against the bytes of their results; the list of torchtitan's selective mode.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_activations(model: nn.Module, blocks: Iterable[str], mode: Literal["none", "full", "selective"]) -> None:
    """Make every block (a module's path) recompute activations in backward. Its forward is replaced in place: parameter names stay."""
    if mode == "none":
        return
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) is True:  # of transformers' decoders
        log.warning(
            "config.use_cache of the model is now False: a recomputed block would append its keys and values to the cache once more"
        )
        config.use_cache = False  # type: ignore[union-attr]
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _recomputing(block.forward, selective=mode == "selective")  # type: ignore[method-assign]


def _recomputing(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}

    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputing_forward


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
