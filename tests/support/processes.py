"""Helpers for tests that start processes: wait for a condition, and see if a process still runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 20.0, pause: float = 0.005) -> T:
    """Wait until ``condition`` returns neither None nor False; return its value.

    ``pause`` is the number of seconds between two calls.
    """
    deadline = time.monotonic() + seconds
    while (value := condition()) is None or value is False:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return value


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
