"""Explains to a user whose device ran out of memory what fills it, and which settings need less.

The figures are those that the placement predicts.
"""

from __future__ import annotations

import torch

from ...engine.accounting.quantities import format_bytes
from ...engine.config.schema import Config
from ...engine.engine import SDPEngine
from ...engine.errors import OutOfMemoryError
from ..shared.remedies import remedies

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether ``error`` is a failed allocation.

    torch raises a class of its own for accelerators, and a RuntimeError for a CPU.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def out_of_memory(config: Config, rank_and_device: str, engine: SDPEngine | None) -> OutOfMemoryError:
    """Make the error to raise.

    Args:
        config: the configuration of the run.
        rank_and_device: the rank and its device, such as "rank 1 on …".
        engine: the engine, None if memory ran out before the engine was built.
    """
    state = ""
    if engine is not None:
        planned = engine.predicted_state_bytes()
        frozen = f"frozen copies {_size(planned.frozen)}, " if planned.frozen else ""
        state = (
            f" Of this rank's memory parameters take {_size(planned.parameters)}, {frozen}gradients "
            f"{_size(planned.gradients)} and the optimizer {_size(planned.optimizer)}; the rest are activations and "
            "buffers."
        )
    return OutOfMemoryError(
        f"{rank_and_device}: out of memory.{state} To need less: {'; '.join(remedies(config))}."
        " What each would need: sdp plan"
    )


def _size(nbytes: int) -> str:
    return format_bytes(nbytes, "GB" if nbytes >= 1e8 else "MB")
