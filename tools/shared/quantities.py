"""Reads sizes and rates as users write them, such as ``80GB`` or ``400Gbit``."""

from __future__ import annotations

import math
import re
from typing import Literal

from ...engine.accounting.quantities import PREFIXES
from ...engine.errors import ConfigError, quote

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*"
_EXAMPLES = {"B": "80GB", "B/s": "50GB/s or 400Gbit", "FLOP/s": "989TFLOP/s"}


def quantity(text: str, unit: Literal["B", "B/s", "FLOP/s"], option: str) -> float:
    """Convert ``text``, such as ``80GB``, ``900G`` or ``989TFLOP/s``, to a number in ``unit``.

    If ``unit`` is "B/s", the text may also give bits per second, such as ``400Gbit``. Raises
    :class:`ConfigError`, also if there is no unit, because 80 may mean bytes or gigabytes. The
    message begins with ``option``.
    """
    if unit == "B/s" and (rate := parse_bit_rate(text)) is not None:
        number: float | None = rate / 8
    else:
        number = _parse(text, unit, unit_needed=True)
    if number is None:
        known = ", ".join(filter(None, PREFIXES))
        raise ConfigError(
            f"{option} {text or repr(text)}: expected a number with a unit, such as {_EXAMPLES[unit]} (before {unit}: "
            f"{known})"
        )
    if not 0 < number < math.inf:
        raise ConfigError(f"{option} {text}: expected a finite number above zero, such as {_EXAMPLES[unit]}")
    return number


def parse_bit_rate(text: str) -> float | None:
    """Return a text such as ``300mbit`` or ``1Gbit/s`` as bits per second. None for other texts."""
    match = re.fullmatch(rf"{_NUMBER}([kmgt]?)bit(?:/s)?\s*", text, re.IGNORECASE)
    if match is None:
        return None
    factor = _factor(match[2], any_case=True)
    return None if factor is None else float(match[1]) * factor


def parse_size(text: str) -> int:
    """Convert ``text``, such as ``500MB``, ``5gib`` or ``500000``, to bytes. Raises ValueError."""
    size = _parse(text, "B", unit_needed=False, any_case=True)
    if size is None or not 1 <= size < math.inf:
        raise ValueError(f"{quote(text)} is not a size; use for example 500MB or 5GB")
    return int(size)


def _parse(text: str, unit: str, *, unit_needed: bool, any_case: bool = False) -> float | None:
    """Read a number, a prefix and a unit. None if ``text`` has another form.

    Args:
        text: The text. Spaces may be around the number.
        unit: The unit. A prefix without it is enough: ``900G``.
        unit_needed: Whether the text needs a prefix or a unit.
        any_case: Whether ``m`` and ``M`` both mean mega.
    """
    match = re.fullmatch(
        rf"{_NUMBER}([kMGTP]i?)?({re.escape(unit)})?\s*", text, re.IGNORECASE if any_case else re.NOFLAG
    )
    if match is None or (unit_needed and not (match[2] or match[3])):
        return None
    factor = _factor(match[2] or "", any_case=any_case)
    return None if factor is None else float(match[1]) * factor


def _factor(text: str, *, any_case: bool) -> float | None:
    known = {prefix.lower() if any_case else prefix: factor for prefix, factor in PREFIXES.items()}
    return known.get(text.lower() if any_case else text)
