"""Converts sizes, times and rates to text for reports and messages.

Reports use decimal units (1 GB is 10⁹ bytes), except for the memory of processes, which they print
in binary units (1 GiB is 2³⁰ bytes).
"""

from __future__ import annotations

import math

DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB")
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

# The bytes of a prefix, as users write it and as reports print it.
PREFIXES = {
    "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def format_bytes(nbytes: float, unit: str = "", digits: int = 2) -> str:
    """Return bytes as text, in ``unit`` or in the largest unit that fits: ``1.50 GB``."""
    if unit:
        return f"{nbytes / PREFIXES[unit.removesuffix('B')]:,.{digits}f} {unit}"
    factor, unit = unit_for(nbytes)
    return f"{nbytes:.0f} B" if factor == 1 else f"{nbytes / factor:.{digits}f} {unit}"


def unit_for(nbytes: float, *, binary: bool = False) -> tuple[int, str]:
    """Return the bytes and the name of the largest unit that is not larger than ``nbytes``."""
    step, names = (1024, BINARY_UNITS) if binary else (1000, DECIMAL_UNITS)
    power = 0
    while power + 1 < len(names) and nbytes >= step ** (power + 1):
        power += 1
    return step**power, names[power]


def format_rate(bytes_per_second: float) -> str:
    """Return a rate in bytes per second as text with four significant digits: ``1,250 GB/s``."""
    return f"{bytes_per_second / PREFIXES['G']:,.4g} GB/s"


def format_seconds(seconds: float) -> str:
    """Return a time as text with at most four significant digits: ``11.63 µs``, ``12,345 s``."""
    factor, unit = next((unit for unit in ((1, "s"), (1e-3, "ms")) if seconds >= unit[0]), (1e-6, "µs"))
    return f"{_significant(seconds / factor)} {unit}"


def format_flops(operations: float) -> str:
    """Return operations as text with at most four significant digits: ``10.04 PFLOP``."""
    prefix = next((prefix for prefix in "PTGMk" if operations >= PREFIXES[prefix]), "")
    return f"{_significant(operations / PREFIXES[prefix])} {prefix}FLOP"


def _significant(number: float) -> str:
    """Round to four significant digits, but keep all digits before the point."""
    before = math.floor(math.log10(number)) if number > 0 else 0
    text = f"{number:,.{max(0, 3 - before)}f}"
    return text.rstrip("0").removesuffix(".") if "." in text else text
