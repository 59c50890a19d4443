"""Expands SLURM's compressed lists: host names (``n[01-03,7],login``) and counts (``2(x3),1``)."""

from __future__ import annotations

import math
import re
from itertools import product

from ..errors import LaunchError, quote

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,18})\))?")
_MOST = 2**20  # far above every cluster; a longer list would fill the memory


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a list with bracketed ranges, in order. Leading zeros are kept.

    Raises:
        LaunchError: The brackets or ranges make no sense.
    """
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise LaunchError(f"node list {quote(text)} cannot be read; expected the form n[01-03,7],login")
    hosts: list[str] = []
    for item in items:
        hosts += _expand_item(item, text)
        _check_length(len(hosts), text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list in which ``2(x3)`` means 2, 2, 2.

    Raises:
        LaunchError: The list has another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise LaunchError(f"task counts {quote(text)} cannot be read; expected the form 2(x3),1")
        times = int(match[2] or 1)
        _check_length(len(counts) + times, text)
        counts += [int(match[1])] * times
    return counts


def _expand_item(item: str, text: str) -> list[str]:
    alternatives = [
        [plain] if plain else [index for span in inner.split(",") for index in _expand_range(span, text)]
        for inner, plain in _PART.findall(item)
    ]
    _check_length(math.prod(map(len, alternatives)), text)
    return ["".join(parts) for parts in product(*alternatives)]


def _expand_range(span: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(span)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise LaunchError(
            f"node list {quote(text)} cannot be read at {quote(span)}; expected a number or a range such as 01-03"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    _check_length(last - first + 1, text)
    return [f"{index:0{len(match[1])}d}" for index in range(first, last + 1)]


def _check_length(length: int, text: str) -> None:
    if length > _MOST:
        raise LaunchError(f"the list {quote(text)} has more than {_MOST:,} entries; check the variables of SLURM")
