"""``training.compile``: compiles the units that a rank holds.

Identical units share a compilation.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..errors import ConfigError


def compile_units(
    model: nn.Module, blocks: Collection[str], device: torch.device, *, sliced: bool = False, phases: int = 1
) -> None:
    """Compile the ``forward`` of every block (a module's path) in place.

    Parameter names stay. Hooks run around the compiled function. Call this after activation
    checkpointing, so that recomputation is part of the compiled graph, and before sharding.

    Args:
        model: The model.
        blocks: Paths of the blocks.
        device: Where the blocks run.
        sliced: The blocks may have slices with different indices. Those need graphs of their own.
        phases: How many sets of slices a block has during the run.

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
            "install it, or use false"
        ) from error  # sdp bench --alone prints the cause
