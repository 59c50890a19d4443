"""What a virtual machine was not given: the part of its processors' time that its hypervisor spent on others, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_STOLEN = 7  # of user, nice, system, idle, iowait, irq, softirq, steal; guests' time after them is in the first two


def ticks() -> tuple[int, int] | None:
    """Stolen and all ticks, since the machine started, of the processors that this process may use; None where the kernel does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        counts = [
            [int(value) for value in values[: _STOLEN + 1]] for word, *values in filter(None, lines) if word in ours
        ]
    except (OSError, ValueError):
        return None
    if not counts or any(len(values) <= _STOLEN for values in counts):
        return None
    return sum(values[_STOLEN] for values in counts), sum(map(sum, counts))


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The stolen part of the time between two counts, 0 … 1; None where it is not known."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(
        1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1]))
    )  # the kernel's counts may go back by a tick
