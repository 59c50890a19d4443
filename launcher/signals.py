"""The signals that a launcher and its ranks catch during a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

GRACE_SECONDS = 10.0  # from a signal to a rank until it is killed

# SIGUSR1 is what SLURM users ask for before a time limit. mpirun passes it on to its ranks without
# ending them.
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A context that collects signals to this process in a list. They do not end the process."""
    received: list[int] = []
    with handled(CAUGHT, lambda caught, _: received.append(caught)):
        yield received


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], Any] | signal.Handlers) -> Iterator[None]:
    """A context in which ``handler`` handles those ``numbers`` that were not ignored before.

    Outside the main thread it does nothing, because Python handles signals only in the main thread.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
