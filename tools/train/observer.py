"""The base class of observers: curves, progress bar, profiler and memory probe watch the training
loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...engine.accounting.memory_probe import watched_peak
from ...engine.engine import SDPEngine

Line = Mapping[str, Any]  # a line of metrics.jsonl or evaluations.jsonl


class Observer:
    """Watches the training loop on one rank. A subclass overrides the hooks that it needs.

    The trainer calls the observers in the order of its list. No hook is collective.
    """

    def on_start(self, start: int, steps: int) -> None:
        """Called before the run goes from step ``start`` to step ``steps``."""

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        """Return a context for forward, backward and update of optimizer step ``step``."""
        return nullcontext()

    def on_step(self, line: Line) -> None:
        """Called after an optimizer step. ``line`` is its line of metrics.jsonl."""

    def on_evaluation(self, line: Line) -> None:
        """Called after the full model was evaluated. ``line`` is a line of evaluations.jsonl."""

    def on_rollback(self, step: int) -> None:
        """Called after the run returned to the checkpoint of ``step``.

        Later steps are made again.
        """

    def on_end(self) -> None:
        """Called after the loop: the run is done, or a signal stopped it."""

    def close(self) -> None:
        """Flush and close files. Called once, also when the run fails."""


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

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if step != self._step:
            yield
            return
        engine = self._engine
        kept = engine.local_training.tensors_on_device()
        with watched_peak(engine.module, engine.optimizer, engine.device, kept=kept) as peak:
            yield
        self.peak = peak()
