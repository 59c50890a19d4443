"""Command-line words in an alphabet that no shell, and neither pdsh nor ssh, reads anything into.

DeepSpeed's runner joins a command with spaces and lets the remote shell read it. So words travel as letters, digits and ``_./:,@-``;
every other byte is ``+`` and two hexadecimal digits.
"""

from __future__ import annotations

import re

_OTHER = re.compile(rb"[^A-Za-z0-9_./:,@-]")
_EMPTY = "+"


def encode(word: str) -> str:
    """``sdp.groups=4`` as ``sdp.groups+3D4``."""
    return _OTHER.sub(lambda match: b"+%02X" % match[0][0], word.encode(errors="surrogateescape")).decode() or _EMPTY


def decode(word: str) -> str:
    """The inverse of :func:`encode`."""
    if word == _EMPTY:
        return ""
    plain = re.sub(rb"\+([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), word.encode())
    return plain.decode(errors="surrogateescape")


def is_safe(word: str) -> bool:
    """Whether ``word`` means itself wherever it stands."""
    return encode(word) == word and not word.startswith("-")
