"""The terminal on which a rank shows the progress of the run."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from ....engine.environment.supervision import inherited_terminal


def open_terminal() -> TextIO:
    """Return the standard error of the launcher if it handed that over, else of this process.

    Called once. The local launcher writes the standard error of a rank above 0 to the rank's log.
    """
    handle = inherited_terminal()
    return sys.stderr if handle is None else os.fdopen(handle, "w", buffering=1, errors="backslashreplace")


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Shows the messages of the log on ``stream``."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.setFormatter(logging.Formatter("%(message)s"))
