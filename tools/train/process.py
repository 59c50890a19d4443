"""The log of a rank, on the terminal and in a file."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import TextIO

from ...engine.errors import WriteError, escape
from ...engine.files import refuse_link, require_own_file

log = logging.getLogger("sdp")
FILE_ONLY = {"file_only": True}  # ``extra`` of a message that the terminal shows in another form


def set_up_logging(rank: int, dump_dir: Path) -> None:
    """Open the log file of a rank. Rank 0 also logs to the terminal.

    Other ranks log only warnings and errors.
    """
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    log.handlers.clear()
    if rank == 0:
        log.addHandler(TerminalHandler(sys.stderr))
    refuse_link(dump_dir / "logs")
    try:
        (dump_dir / "logs").mkdir(parents=True, exist_ok=True)
        handler = LogFile(dump_dir / "logs" / f"rank-{rank}.log")
    except OSError as error:
        raise WriteError.of(dump_dir / "logs", error) from None
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)


class LogFile(logging.FileHandler):
    """Appends the log to a file. If this fails, a line on stderr says so once, and the run goes on.

    Raises WriteError if ``path`` is not a regular file.
    """

    def __init__(self, path: Path):
        require_own_file(path)
        super().__init__(path, encoding="utf-8")
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            with contextlib.suppress(OSError):  # stderr of a rank above 0 is the same file
                print(f"sdp: WARNING: {self.baseFilename}: cannot be written ({error.strerror})", file=sys.stderr)


class PrintableFormatter(logging.Formatter):
    """Formats messages, and escapes control characters, because these could change the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Prints the messages of the log on ``stream``. If the terminal is gone, the run goes on."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.setFormatter(PrintableFormatter("%(message)s"))
        self.addFilter(lambda record: not hasattr(record, "file_only"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        if not isinstance(sys.exc_info()[1], OSError):  # the terminal is gone, and the run goes on
            super().handleError(record)
