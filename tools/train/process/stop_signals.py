"""Signals that end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# mpirun passes SIGUSR1 on to its ranks without ending them. SLURM users ask for this signal before
# a time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """Remembers signals to this rank. ``received`` is the newest one, or 0."""

    def __init__(self) -> None:
        self.received = 0

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
        self.received = number
