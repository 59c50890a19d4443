"""Reads JSON from outside, and raises a clear error for anything that SDP cannot use.

Python's own parser raises RecursionError for deep values, and an unclear ValueError for long
numbers. It accepts broken Unicode text, which cannot be printed later.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import shorten

MOST_BYTES = 64 << 20
MOST_DEPTH = 200
MOST_DIGITS = 308  # every whole number can then become a float of 64 bits


class JsonError(ValueError):
    """A text is not valid JSON, or exceeds a limit. The message says what is wrong."""


def parse_json(text: str, *, unique_keys: bool = False) -> Any:
    """Return the value of the JSON text.

    Args:
        unique_keys: whether an object that has a key twice is an error.

    Raises:
        JsonError: ``text`` is not valid JSON, or exceeds a limit of depth or digits.
    """

    def check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise JsonError(f"{shorten(key)}: one section has this key twice; remove one")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=check_keys if unique_keys else None, parse_int=_whole_number)
        _check_value(value)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.lineno}:{error.colno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise JsonError(f"sections and lists are nested more than {MOST_DEPTH} levels deep") from None
    return value


def read_json_file(path: Path, *, unique_keys: bool = False, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file.

    Args:
        path: a file in UTF-8, with or without a byte order mark.
        unique_keys: whether an object that has a key twice is an error.
        most_bytes: a larger file is an error.

    Raises:
        JsonError: the file is not valid JSON in UTF-8, or exceeds a limit.
        OSError: the file cannot be read, or is not a regular file.
    """
    return parse_json(read_text_file(path, most_bytes=most_bytes), unique_keys=unique_keys)


def read_text_file(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text in a file. Raises the errors of :func:`read_json_file`."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if kind == errno.EISDIR else "it is not a regular file", str(path))
    # The flag matters only if somebody replaces the file in between.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise JsonError(f"the file is larger than {most_bytes >> 10:,} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"cannot be read, it is not text in UTF-8 (byte {error.start})") from None


def _whole_number(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise JsonError(f"a number has {len(text)} digits, and {MOST_DIGITS} are allowed")
    return int(text)


def _check_value(value: Any) -> None:
    """Check depth and text without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH + 1:
            raise JsonError(f"sections and lists are nested more than {MOST_DEPTH} levels deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise JsonError("a text has half of a surrogate pair (\\ud800 to \\udfff)") from None
