"""What a virtual machine was not given: the part of its processors' time that its hypervisor spent on others, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

_STAT = Path("/proc/stat")
_STOLEN = 7  # of user, nice, system, idle, iowait, irq, softirq, steal; guests' time after them is in the first two


def ticks() -> tuple[int, int] | None:
    """Stolen and all ticks of all processors since this machine started; None where the kernel does not tell."""
    try:
        word, *values = _STAT.read_text().splitlines()[0].split()
        counts = [int(value) for value in values[: _STOLEN + 1]]
    except (OSError, IndexError, ValueError):
        return None
    return (counts[_STOLEN], sum(counts)) if word == "cpu" and len(counts) > _STOLEN else None


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float:
    """The stolen part of the time between two counts, 0 … 1; 0 where it is not known."""
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return (after[0] - before[0]) / (after[1] - before[1])
