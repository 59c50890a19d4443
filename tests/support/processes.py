"""Helpers for tests that start processes."""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 20.0, pause: float = 0.005) -> T:
    """Wait until ``condition``, asked every ``pause`` seconds, is neither None nor False."""
    deadline = time.monotonic() + seconds
    while (value := condition()) is None or value is False:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return value


def written_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON lines file that a process may be writing to."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def limit_addresses(more: int) -> None:
    """Allow this process, and those that it starts, so many more bytes of addresses than it has."""
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
