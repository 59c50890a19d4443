"""Signals that a launcher and its ranks catch during a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

GRACE_SECONDS = 10.0  # from a signal to a rank until it is killed

# SIGUSR1 is what SLURM users ask for before a time limit. mpirun passes it on to its ranks without
# ending them.
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect signals to this process in a list while inside, instead of dying of them.

    A signal that is ignored (SIGHUP under nohup) stays ignored. Outside the main thread, which
    alone may handle signals, nothing is caught.
    """
    received: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda caught, _: received.append(caught))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ignored(number: int) -> Iterator[None]:
    """Ignore the signal ``number`` while inside. This needs the main thread."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, previous)
