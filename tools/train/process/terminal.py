"""The terminal on which a rank shows the progress of the run."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from ....engine.environment.supervision import inherited_terminal, whereabouts_file
from ....engine.errors import escape


def open_terminal() -> TextIO | None:
    """Return the standard error of the launcher if it handed that over, or else of this process.

    None if there is no terminal: the local launcher writes the standard error of a rank above 0 to
    the rank's log. Called once.
    """
    handle = inherited_terminal()
    if handle is None:
        return None if whereabouts_file() is not None else sys.stderr
    return os.fdopen(handle, "w", buffering=1, errors="backslashreplace")


class PrintableFormatter(logging.Formatter):
    """Escapes control characters, which names in files may have."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Shows the messages of the log on ``stream``."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.setFormatter(PrintableFormatter("%(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        if not isinstance(sys.exc_info()[1], OSError):  # the terminal is gone, and the run goes on
            super().handleError(record)
