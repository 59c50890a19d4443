"""Measures the peak of live tensors in one step."""

from __future__ import annotations

from collections.abc import Callable

from ....engine.accounting.memory_probe import peak_tensor_bytes
from ....engine.engine import SDPEngine
from .observer import Observer

PROBED_STEP = 2  # the first step allocates optimizer state; the steps after it allocate the same


class MemoryProbe(Observer):
    """Runs one step under the probe. ``peak`` is the result in bytes, first None.

    It is step ``PROBED_STEP``. With a schedule of maskings, it is the first later step with
    backward masking, which needs the most memory.
    """

    def __init__(self, engine: SDPEngine):
        self._engine = engine
        schedule = engine.config.masking_schedule
        backward = [start for start in schedule.starts if schedule.at(start) == "backward"]
        self._step = max(PROBED_STEP, backward[0]) if backward else PROBED_STEP
        self.peak: int | None = None

    @staticmethod
    def works_with(engine: SDPEngine) -> bool:
        """Whether the probe sees all memory. On a CPU, it misses allocations of compiled code."""
        return engine.device.type == "cuda" or not engine.config.training.compile

    def around_step(self, step: int, compute: Callable[[], None]) -> None:
        if step == self._step:
            engine = self._engine
            self.peak = peak_tensor_bytes(
                compute, engine.module, engine.optimizer, engine.device, kept=engine.local_training.tensors_on_device()
            )
        else:
            compute()
