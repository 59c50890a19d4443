"""Numbers with units: as users write them, and as reports print them. All of a report is decimal: 1 GB is 10⁹ bytes."""

from __future__ import annotations

import math
import re
from typing import Literal

from ...engine.errors import ConfigError

_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*"
_EXAMPLES = {"B": "80GB", "B/s": "50GB/s or 400Gbit", "FLOP/s": "989TFLOP/s"}


def quantity(text: str, unit: Literal["B", "B/s", "FLOP/s"], option: str) -> float:
    """The number that ``text`` says in ``unit``: ``80GB``, ``80GiB``, ``900G``, ``989TFLOP/s``; with "B/s" bits a second too, in which
    links are sold: ``400Gbit``, ``100gbit/s``. Raises :class:`ConfigError`, also where no unit is said: 80 may mean bytes or gigabytes.
    """
    bits = re.fullmatch(rf"{_NUMBER}([kmgt]?)bit(?:/s)?\s*", text, re.IGNORECASE) if unit == "B/s" else None
    if bits is not None:
        number, factor = float(bits[1]), _BITS.get(bits[2].lower(), 1.0) / 8
    else:
        match = re.fullmatch(rf"{_NUMBER}([kMGTP]i?)?({re.escape(unit)})?\s*", text)
        if match is None or (match[2] or "") not in _UNITS or not (match[2] or match[3]):
            known = ", ".join(filter(None, _UNITS))
            raise ConfigError(
                f"{option} {text or repr(text)}: expected a number with a unit, such as {_EXAMPLES[unit]} (before {unit}: {known})"
            )
        number, factor = float(match[1]), _UNITS[match[2] or ""]
    if not 0 < number * factor < math.inf:
        raise ConfigError(
            f"{option} {text}: expected more than nothing and less than everything, such as {_EXAMPLES[unit]}"
        )
    return number * factor


def decimal(nbytes: float) -> str:
    """Bytes in B, kB, MB, GB or TB, the largest of which there is one at least."""
    for power, name in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.2f} {name}"
    return f"{nbytes:.0f} B"
