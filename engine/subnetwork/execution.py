"""Activation checkpointing, autocast and compilation of the blocks of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # makes its operator
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ..config.schema import Config
from ..errors import ConfigError
from ..model_interface import get_config

log = logging.getLogger("sdp")

# Operators that cost much time to recompute per byte of their results, as in torchtitan.
_SAVED = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def checkpoint_activations(model: nn.Module, blocks: Iterable[str], mode: Literal["none", "full", "selective"]) -> None:
    """Make blocks compute their activations again in backward, instead of keeping them.

    Only ``forward`` of each block is replaced, so parameter names stay.

    Args:
        model: The model.
        blocks: Paths of the blocks.
        mode: "full" keeps only the inputs of blocks, "selective" also keeps results of matrix
            products and attention, and "none" changes nothing.
    """
    if mode == "none":
        return
    config = get_config(model)
    if getattr(config, "use_cache", False) is True:  # decoders of transformers
        log.warning(
            "config.use_cache of the model is now False: a recomputed block would append its keys and values to the "
            "cache again"
        )
        config.use_cache = False  # type: ignore[union-attr]
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _recomputing(block, block.forward, selective=mode == "selective")  # type: ignore[method-assign]


def _recomputing(block: nn.Module, forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _SAVED)} if selective else {}
    tracks = next(block.buffers(), None) is not None

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        running, recomputing = context.get("context_fn", noop_context_fn)()
        return running, _buffers_kept(block, recomputing)

    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if tracks and not torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # A compiled block writes to its buffers once, even if it is recomputed. The compiler only
        # accepts contexts of its own, which are therefore passed unchanged.
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputing_forward


@contextmanager
def _buffers_kept(block: nn.Module, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Run ``context`` and then restore the block's buffers.

    A recomputation must not count a batch in running statistics a second time.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        with context:
            yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)


def autocast_forward(model: nn.Module, config: Config, device: torch.device) -> None:
    """Run every forward pass of ``model`` under autocast, if the configuration asks for it.

    This applies to training and evaluation. Parameters stay float32.
    """
    dtype = config.autocast_dtype
    if dtype is not None:
        model.forward = torch.autocast(device.type, dtype=getattr(torch, dtype))(model.forward)  # type: ignore[method-assign]


def compile_units(
    model: nn.Module, blocks: Collection[str], device: torch.device, *, sliced: bool = False, phases: int = 1
) -> None:
    """Compile the ``forward`` of every block in place.

    Parameter names stay. Hooks run around the compiled function. Call this after activation
    checkpointing, so that recomputation is part of the compiled graph, and before sharding.

    Args:
        model: The model.
        blocks: Paths of the blocks.
        device: Where the blocks run.
        sliced: Whether blocks may have slices with different indices, which need separate graphs.
        phases: How many maskings the run has. A block may have other slices under each masking.

    Raises:
        ConfigError: torch.compile does not work for ``device``.
    """
    _require_compiler(device)
    if sliced:
        # By default, torch stops after 8 graphs and runs further blocks uncompiled. A block needs
        # up to 3: for training, evaluation and a batch of another size.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 3 * phases * len(blocks))
    for name in blocks:
        block = model.get_submodule(name)
        # Widths of slices are fixed. Since they differ between blocks, torch would treat them as
        # dynamic.
        block.forward = torch.compile(block.forward, dynamic=False if sliced else None)  # type: ignore[method-assign]


def _require_compiler(device: torch.device) -> None:
    """Compile one sum, to find a missing C++ compiler, header or Triton early."""
    try:
        torch.compile(lambda x: (x + 1).sum())(torch.zeros(64, device=device))
    except Exception as error:  # torch and the compiler raise many classes
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        needs = "a C++ compiler (CXX)" if device.type == "cpu" else "Triton and a C compiler"
        raise ConfigError(
            f"training.compile: torch.compile does not work here for {device.type} ({reason}); it needs {needs}: "
            "install it, or set training.compile to false"
        ) from error  # sdp bench --alone prints the cause
