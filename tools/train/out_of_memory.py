"""What to tell a user whose device has no memory left: what fills it by the placement, and which settings would need less."""

from __future__ import annotations

import torch

from ...engine.config.schema import Config
from ...engine.engine import SDPEngine
from ...engine.errors import OutOfMemoryError
from ..shared.remedies import remedies

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch raises a class of its own for accelerators, a RuntimeError for a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def out_of_memory(config: Config, place: str, engine: SDPEngine | None) -> OutOfMemoryError:
    """The error to raise at ``place`` ("rank 1 on …"); ``engine`` is None where it ran out before there was one."""
    state = ""
    if engine is not None:
        planned = engine.predicted_state_bytes()
        frozen = f"frozen copies {_size(planned.frozen)}, " if planned.frozen else ""
        state = (
            f" Of this rank's memory parameters take {_size(planned.parameters)}, {frozen}gradients {_size(planned.gradients)} and the "
            f"optimizer {_size(planned.optimizer)}; the rest are activations and buffers."
        )
    return OutOfMemoryError(
        f"{place}: out of memory.{state} To need less: {'; '.join(remedies(config))}. What each would need: sdp plan"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
