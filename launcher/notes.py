"""Lines about the groups of an elastic run, for the terminal and for the run's ``groups.log``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from ..engine.errors import LaunchError, escape
from .own_files import open_own_file

GROUPS_LOG = "groups.log"


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


def say_and_note(log: Path, text: str) -> None:
    """Print a line about the groups, and append it with the time to ``log``.

    If the log cannot be written, only the terminal has the line.

    Args:
        log: the path of the run's ``groups.log``.
        text: the line.
    """
    say(text)
    with contextlib.suppress(OSError, LaunchError), os.fdopen(open_own_file(log), "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {escape(text)}\n")
