"""Turns failures of the machine into errors of one line.

If memory runs out, the message says what fills it (by the plan), and which settings need less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...engine.accounting.quantities import format_bytes
from ...engine.checkpoint.storage.remote import describe_newest
from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import GONE, Heartbeat
from ...engine.engine import SDPEngine
from ...engine.errors import NO_ROOM, OutOfMemoryError, PeerLostError, WriteError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def explained(
    config: Config, beat: Heartbeat, checkpoints: str | Path, engine: SDPEngine | None = None
) -> Iterator[None]:
    """A context that turns failures of the machine into errors of one line.

    - A failed allocation becomes an OutOfMemoryError that names settings that need less memory.
    - A broken connection becomes a PeerLostError.
    - A full disk becomes a WriteError that names the newest checkpoint.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises a class of its own for accelerators, and a RuntimeError for a CPU.
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error):
            raise _out_of_memory(config, str(beat.position), engine) from None
        if (gone := GONE.search(str(error))) is None:
            raise
        raise PeerLostError(
            f"{beat.position}: another rank is gone ({gone[0]}); its log or its launcher says why"
        ) from None
    except (OSError, WriteError) as error:
        if isinstance(error, OSError):
            if error.errno not in NO_ROOM:
                raise
            error = WriteError.of(error.filename or checkpoints, error)
        raise WriteError(f"{error}; the newest checkpoint: {describe_newest(checkpoints)}") from None


def _out_of_memory(config: Config, rank_and_device: str, engine: SDPEngine | None) -> OutOfMemoryError:
    """Make the error. ``engine`` is None if memory ran out before the engine was built."""
    state = ""
    if engine is not None:
        planned = engine.predicted_state_bytes()
        frozen = f"frozen copies {_size(planned.frozen)}, " if planned.frozen else ""
        state = (
            f" Of this rank's memory, parameters take {_size(planned.parameters)}, {frozen}gradients "
            f"{_size(planned.gradients)} and the optimizer {_size(planned.optimizer)}; the rest are activations and "
            "buffers."
        )
    return OutOfMemoryError(
        f"{rank_and_device}: out of memory.{state} These need less memory: {'; '.join(remedies(config))}. sdp plan "
        "says how much each needs"
    )


def _size(nbytes: int) -> str:
    return format_bytes(nbytes, "GB" if nbytes >= 1e8 else "MB")


def remedies(config: Config) -> list[str]:
    """Return settings that need less memory and are not used yet, the cheapest first."""
    found = []
    if config.activation_checkpointing.mode == "none":
        found.append('activation_checkpointing.mode "selective" or "full" (recomputes activations)')
    micro = config.train_micro_batch_size_per_gpu
    if micro is None or micro > 1:
        found.append("a smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps")
    if config.zero_optimization.stage < 3:
        found.append("zero_optimization.stage 3 with more ranks per group (shares the state among them)")
    groups, capacity = config.sdp.groups, config.sdp.capacity
    most = max(capacity) if isinstance(capacity, list) else capacity
    if groups > 1 and not isinstance(config.sdp.placement, dict) and 1 / groups < most:
        found.append(f"an sdp.capacity below {most:g} (down to {1 / groups:g} with {groups} groups)")
    if groups == 1:
        found.append("several sdp.groups with a capacity below 1")
    if config.compute_bytes == 4:
        found.append("bf16.enabled (halves activations)")
    if config.data.name is None:
        found.append("a shorter data.sequence_length")
    elif config.data.name == "folder":
        found.append("a smaller data.image_size")
    return found
