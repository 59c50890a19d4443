"""What is said of the groups of an elastic run, on the terminal and in the run's log of them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from ..engine.errors import LaunchError, escape
from .own_files import open_own_file

GROUPS_LOG = "groups.log"


def say(text: str) -> None:
    """Say something on the terminal."""
    print(f"sdp: {escape(text)}", file=sys.stderr, flush=True)


def say_and_note(log: Path, text: str) -> None:
    """Say something of the groups, and append it to the run's log of them."""
    say(text)
    with contextlib.suppress(OSError, LaunchError), os.fdopen(open_own_file(log), "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {escape(text)}\n")
