"""Whether a process is active, which tells a hang from work that takes long. Linux only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_GAP_SECONDS = 1.0  # after which nobody knows whether the CPU was used meanwhile
_LEAST_SHARE = 0.02  # of one core; each of gloo's threads uses 0.001 of one while it waits
_LEAST_BYTES = 1 << 18  # sent in a second; a rank that waits sends less than a kilobyte
_ACTIVE = "RD"  # runs or wants to, waits for a disk or for memory
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessActivity:
    """Looks at this process and at those that it started, such as compilers.

    Call both methods often, always from the same thread, whose CPU time does not count.

    Args:
        look_seconds: the time between two looks at all threads and children.
    """

    def __init__(self, look_seconds: float = 1.0):
        self._look_seconds = look_seconds
        self._main = Path(f"/proc/self/task/{os.getpid()}")
        self._since = self._last = self._looked = self._counted = -float("inf")
        self._used: dict[Path, float] = {}  # CPU seconds of each thread and child at the last look
        self._sent, self._sends = 0, False

    def idle_seconds(self) -> float:
        """Return for how many seconds the CPU was not used. 0 if the system does not tell.

        It is in use if the main thread or a child runs, wants to run, or waits for a disk, or if a
        thread or a child uses more than 2 % of a core.
        """
        now = time.monotonic()
        if now - self._last > _GAP_SECONDS or self._is_active(now):
            self._since = now
        self._last = now
        return now - self._since

    def is_sending(self) -> bool:
        """Return whether this process sent or wrote much in the last second."""
        now = time.monotonic()
        if (elapsed := now - self._counted) >= 1:
            before, self._sent, self._counted = self._sent, _written_bytes(), now
            self._sends = self._sent - before > _LEAST_BYTES * elapsed
        return self._sends

    def _is_active(self, now: float) -> bool:
        main = _state_and_seconds(self._main)
        if main is None or main[0] in _ACTIVE or not (self._main / "children").exists():
            return True
        if (elapsed := now - self._looked) < self._look_seconds:
            return False
        before, ended = self._used, os.times()
        self._looked, self._used = now, {Path("ended"): ended.children_user + ended.children_system}
        own, active = self._main.with_name(str(threading.get_native_id())), False
        for each in (*_numbers_in(self._main.parent), *_descendants(self._main.parent)):
            if each != own and (found := _state_and_seconds(each)) is not None:
                active |= found[0] in _ACTIVE and each.parent != self._main.parent
                self._used[each] = found[1]
        least = max(2 / _TICKS, _LEAST_SHARE * elapsed)
        return active or any(seconds - before.get(each, 0.0) > least for each, seconds in self._used.items())


def _state_and_seconds(process: Path) -> tuple[str, float] | None:
    """Return the state and the CPU time of a process or thread, None if it is gone."""
    try:
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return None


def _numbers_in(folder: Path) -> list[Path]:
    """Return the threads or processes below a folder of /proc, none if it is gone."""
    try:  # Path.glob would fail if the folder vanished while it looks
        return [each for each in folder.iterdir() if each.name.isdecimal()]
    except OSError:
        return []


def _descendants(tasks: Path) -> Iterator[Path]:
    """Yield the children of a process, their children, and so on. ``tasks``: its threads."""
    for task in _numbers_in(tasks):
        try:
            numbers = (task / "children").read_text().split()
        except OSError:
            continue
        for number in numbers:
            child = Path("/proc") / number
            yield child
            yield from _descendants(child / "task")


def _written_bytes() -> int:
    """Return what this process has written so far, as gloo writes to its sockets. 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))
    except (OSError, ValueError, StopIteration):
        return 0
