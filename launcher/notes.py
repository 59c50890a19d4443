"""Prints lines of the launcher on the terminal."""

from __future__ import annotations

import contextlib
import sys

from ..engine.errors import escape


def show(text: str) -> None:
    """Print a text on the terminal (stderr), without control characters.

    If the terminal is gone, the run goes on, and ends as it should.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(escape(text), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line of this package on the terminal, as :func:`show` does."""
    show(f"sdp: {text}")
