"""Signals that a launcher catches while ranks run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

GRACE_SECONDS = 10.0


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them; those that are ignored (nohup) stay ignored."""
    received: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda caught, _: received.append(caught))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
