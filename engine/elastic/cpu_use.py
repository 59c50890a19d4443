"""For how long a process has not used the CPU, which tells a hang from work that takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_LEAST_SHARE = 0.01  # of one core; the threads of a process that waits use less
_LEAST_SECONDS = 0.01  # CPU time that counts as use, however short the time between two looks
_LOOK_AT_CHILDREN_SECONDS = 1.0
_ACTIVE = "RD"  # runs or wants to, waits for a disk or for memory
_TICKS = os.sysconf("SC_CLK_TCK")


class CPUUse:
    """Looks at this process and at those that it started, such as compilers. Linux only.

    Call :meth:`idle_seconds` several times in a second, always from the same thread. The CPU time
    of this thread does not count.
    """

    def __init__(self) -> None:
        self._main = Path(f"/proc/self/task/{os.getpid()}")
        self._since = self._last = self._looked = -float("inf")
        self._used = self._children_used = 0.0

    def idle_seconds(self) -> float:
        """Return for how many seconds the CPU was not used. 0 if the system does not tell.

        It is in use if the main thread or a child runs, wants to run, or waits for a disk, and if
        all threads together use more than 1 % of a core.
        """
        now, used = time.monotonic(), time.process_time() - time.thread_time()
        new = used - self._used
        is_late = now - self._last > _LOOK_AT_CHILDREN_SECONDS  # nobody has looked for a while
        if is_late or new > max(_LEAST_SECONDS, _LEAST_SHARE * (now - self._since)) or self._is_active(now):
            self._since, self._used = now, used
        self._last = now
        return now - self._since

    def _is_active(self, now: float) -> bool:
        """Return whether the main thread or a child is active now."""
        main = _state_and_seconds(self._main)
        if main is None or main[0] in _ACTIVE:
            return True
        if now - self._looked < _LOOK_AT_CHILDREN_SECONDS:
            return False
        elapsed, self._looked = now - self._looked, now
        found = [each for child in _descendants(self._main.parent) if (each := _state_and_seconds(child)) is not None]
        ended = os.times()
        used = sum(seconds for _, seconds in found) + ended.children_user + ended.children_system
        # A child that ends takes its time away, or adds it to that of the ended ones.
        change, self._children_used = abs(used - self._children_used), used
        return any(state in _ACTIVE for state, _ in found) or change > max(1 / _TICKS, _LEAST_SHARE * elapsed)


def _state_and_seconds(process: Path) -> tuple[str, float] | None:
    """Return the state and the CPU time of a process or thread, None if it is gone."""
    try:
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return None


def _descendants(tasks: Path) -> Iterator[Path]:
    """Yield the children of a process, their children, and so on. ``tasks``: its threads."""
    for task in tasks.glob("[0-9]*"):
        try:
            numbers = (task / "children").read_text().split()
        except OSError:
            continue
        for number in numbers:
            child = Path("/proc") / number
            yield child
            yield from _descendants(child / "task")
