"""``training.compile``: the units that a rank holds are compiled in place, one compilation for all that are alike."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..errors import ConfigError


def compile_units(model: nn.Module, blocks: Collection[str], device: torch.device, *, sliced: bool = False) -> None:
    """Compile the ``forward`` of every block (a module's path) in place: parameter names stay, and so do hooks, which run around it.

    To be called after activation checkpointing (recomputation is then part of the compiled graph) and before sharding. ``sliced``: blocks
    may have slices of different indices, and those that do have a graph of their own. Raises :class:`ConfigError` where nothing can
    be compiled for ``device``.
    """
    _require_compiler(device)
    if sliced:  # else torch gives up after 8 graphs and runs further blocks uncompiled; 3: of training and evaluation, and odd batches
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 3 * len(blocks))
    for name in blocks:
        block = model.get_submodule(name)
        # Widths of slices are as fixed as other shapes of weights, but torch would take those that differ among blocks for variable.
        block.forward = torch.compile(block.forward, dynamic=False if sliced else None)  # type: ignore[method-assign]


def _require_compiler(device: torch.device) -> None:
    """Compile one sum, so that a missing C++ compiler, header or Triton is found before anything else is done."""
    try:
        torch.compile(lambda x: (x + 1).sum())(torch.zeros(64, device=device))
    except Exception as error:  # of many classes, torch's own and the compiler's
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        needs = "a C++ compiler (CXX)" if device.type == "cpu" else "Triton and a C compiler"
        raise ConfigError(
            f"training.compile: torch.compile does not work here for {device.type} ({reason}); it needs {needs}: install it, or use false"
        ) from error  # sdp gpu-check prints it
