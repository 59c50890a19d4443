"""Signals that end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# mpirun passes SIGUSR1 on to its ranks without ending them. SLURM users ask for this signal before
# a time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """Remembers signals to this rank. ``received`` is the newest one, or 0.

    It also remembers when the first one came.
    """

    def __init__(self) -> None:
        self.received, self._first = 0, float("inf")

    @property
    def seconds(self) -> float:
        """The seconds since the first signal. Minus infinity if there was none."""
        return time.monotonic() - self._first

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals while inside. An ignored signal (SIGHUP under nohup) stays ignored."""
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _: Any) -> None:
        self._first = min(self._first, time.monotonic())
        self.received = number
