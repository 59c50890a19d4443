"""CPU steal: the part of a virtual machine's processor time that its hypervisor gave to others."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
# The column of steal, after user, nice, system, idle, iowait, irq and softirq. Later columns repeat
# guests' time.
_STOLEN = 7


def ticks(stat: Path = STAT) -> tuple[int, int] | None:
    """Read the stolen ticks and all ticks since boot, of the processors that this process may use.

    Returns None if the kernel does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        counts = [
            [int(value) for value in values[: _STOLEN + 1]] for word, *values in filter(None, lines) if word in ours
        ]
    except (OSError, ValueError):
        return None
    if not counts or any(len(values) <= _STOLEN for values in counts):
        return None
    return sum(values[_STOLEN] for values in counts), sum(map(sum, counts))


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Return the stolen part of the time between two counts, from 0 to 1.

    None if it is not known.
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    share = (after[0] - before[0]) / (after[1] - before[1])
    return min(1.0, max(0.0, share))  # the kernel's counts may go back by a tick
