"""What to tell a user whose device has no memory left: what fills it by the placement, and which settings would need less."""

from __future__ import annotations

import torch

from ..engine.config.schema import Config
from ..engine.engine import SDPEngine
from ..engine.errors import OutOfMemoryError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch raises a class of its own for accelerators, a RuntimeError for a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error))


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
    return OutOfMemoryError(f"{place}: out of memory.{state} To need less: {'; '.join(remedies(config))}. What each would need: sdp plan")


def remedies(config: Config) -> list[str]:
    """Settings that lower memory and are not used yet, those that cost the least first."""
    found = []
    if config.activation_checkpointing.mode == "none":
        found.append('activation_checkpointing.mode "selective" or "full" (recomputes activations)')
    micro = config.train_micro_batch_size_per_gpu
    if micro is None or micro > 1:
        found.append("a smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps")
    if config.zero_optimization.stage < 3:
        found.append("zero_optimization.stage 3 with more ranks per group (shares the state among them)")
    if config.sdp.groups > 1 and not isinstance(config.sdp.placement, dict) and _lowest(config) < _capacity(config):
        found.append(f"an sdp.capacity below {_capacity(config):g} (down to {_lowest(config):g} with {config.sdp.groups} groups)")
    if config.sdp.groups == 1:
        found.append("several sdp.groups with a capacity below 1")
    if config.compute_bytes == 4:
        found.append("bf16.enabled (halves activations)")
    if config.data.name is None:
        found.append("a shorter data.sequence_length")
    elif config.data.name == "folder":
        found.append("a smaller data.image_size")
    return found


def _capacity(config: Config) -> float:
    capacity = config.sdp.capacity
    return max(capacity) if isinstance(capacity, list) else capacity


def _lowest(config: Config) -> float:
    return 1 / config.sdp.groups


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
