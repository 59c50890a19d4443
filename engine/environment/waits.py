"""Says in a line what a long wait is for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SILENT_SECONDS = 20.0
log = logging.getLogger("sdp")


@contextmanager
def announced(reason: Callable[[], str | None]) -> Iterator[None]:
    """A context that logs ``reason()`` once, if that is not None after SILENT_SECONDS."""

    def announce() -> None:
        if (line := reason()) is not None:
            log.warning("%s", line)

    timer = threading.Timer(SILENT_SECONDS, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compiler_locks() -> str | None:
    """Name the locks under which ``torch.utils.cpp_extension`` compiles, or None if there is none.

    A process that was killed leaves its lock behind, and later ones wait for it without end.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    ages = {lock: time.time() - lock.stat().st_mtime for lock in root.glob("**/lock")}
    if not ages:
        return None
    locks = ", ".join(f"{lock} ({seconds / 60:.0f} minutes old)" for lock, seconds in ages.items())
    return f"a C++ extension is compiled, or waits for its lock: {locks}; if no process compiles it, remove the lock"
