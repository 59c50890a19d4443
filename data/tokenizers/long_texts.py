"""Cuts a long text into pieces. The tokens of all pieces are the tokens of the whole text.

A tokenizer needs many times the memory of its input, so a document of hundreds of megabytes cannot
be encoded at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .kinds import Tokenizer

PIECE_CHARACTERS = 2**18
_CONTEXT_CHARACTERS = 256
_CANDIDATES = 8

# Cuts after the end of a line are tried first, then cuts before a space.
_BOUNDARIES = (re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)(?= )"))


def cut_text(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Cut ``text`` into pieces, and yield them in order.

    A cut is made where the text around it has the same tokens as both sides on their own. A piece
    may have no such position, for example a megabyte of one letter. It is then cut where both sides
    still decode to the same text. If there is no such position either, the piece gets longer. This
    happens with tokenizers that add a space to the start of every text.
    """
    start, end = 0, PIECE_CHARACTERS
    while end < len(text):
        cut = _find_cut(text, end, tokenizer)
        if cut is not None:
            yield text[start:cut]
            start, end = cut, cut
        end += PIECE_CHARACTERS
    yield text[start:]


def _find_cut(text: str, end: int, tokenizer: Tokenizer) -> int | None:
    """Find a position for a cut at ``end`` or at most half a piece before it, or return None."""
    first = end - PIECE_CHARACTERS // 2
    for boundary in _BOUNDARIES:
        boundaries = [match.end() for match in boundary.finditer(text, first, end)]
        for cut in boundaries[: -_CANDIDATES - 1 : -1]:
            if _keeps_tokens(text, cut, tokenizer):
                return cut
    return end if _keeps_text(text, end, tokenizer) else None


def _around(text: str, cut: int) -> tuple[str, str]:
    return text[max(0, cut - _CONTEXT_CHARACTERS) : cut], text[cut : cut + _CONTEXT_CHARACTERS]


def _keeps_tokens(text: str, cut: int, tokenizer: Tokenizer) -> bool:
    left, right = _around(text, cut)
    return tokenizer.encode(left) + tokenizer.encode(right) == tokenizer.encode(left + right)


def _keeps_text(text: str, cut: int, tokenizer: Tokenizer) -> bool:
    left, right = _around(text, cut)
    return tokenizer.decode(tokenizer.encode(left) + tokenizer.encode(right)) == left + right
