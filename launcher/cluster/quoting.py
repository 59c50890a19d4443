"""Encode command-line words so that shells, pdsh and ssh pass them on unchanged.

DeepSpeed's runner joins a command with spaces, and the remote shell splits it again. So encoded
words consist of letters, digits and ``_./:,@-``. Every other byte becomes ``+`` and two
hexadecimal digits.
"""

from __future__ import annotations

import re

_OTHER = re.compile(rb"[^A-Za-z0-9_./:,@-]")
_EMPTY = "+"


def encode(word: str) -> str:
    """Encode a word: ``sdp.groups=4`` becomes ``sdp.groups+3D4``."""
    return _OTHER.sub(lambda match: b"+%02X" % match[0][0], word.encode(errors="surrogateescape")).decode() or _EMPTY


def decode(word: str) -> str:
    """Undo :func:`encode`."""
    if word == _EMPTY:
        return ""
    plain = re.sub(rb"\+([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), word.encode())
    return plain.decode(errors="surrogateescape")


def is_safe(word: str) -> bool:
    """Whether shells and launchers pass ``word`` on unchanged."""
    return encode(word) == word and not word.startswith("-")
