"""Where a rank is in its run: written down for whoever watches it, and watched by a thread of its own for a rank that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0
_RECORD_BYTES = 256  # every record overwrites the one before, so all have one size


@dataclass(frozen=True)
class Place:
    """``phase`` in words, in or after optimizer step ``step``; ``since``: seconds since the epoch."""

    rank: int
    host: str
    step: int
    phase: str
    since: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, step {self.step}, {self.phase}"

    @classmethod
    def read(cls, path: Path) -> Place | None:
        """What a rank wrote to ``path`` last, or None."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


class Heartbeat:
    """Told by the training loop what it does next, and for how many seconds at most that may take.

    ``file``: where the place is written, None for nowhere. Once a phase takes longer than it may, the stacks of all threads are
    appended to ``log``, ``on_stall`` is called with a message, and the process ends, also where the file system itself hangs.
    """

    def __init__(self, rank: int, file: Path | None, log: Path, on_stall: Callable[[str], None]):
        self._rank, self._host, self._on_stall = rank, socket.gethostname(), on_stall
        self._log = log.open("a", encoding="utf-8")
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if file is not None else None
        self._place = Place(rank, self._host, 0, "starting", time.time())
        self._seconds: float | None = None
        self._started = time.monotonic()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    @property
    def place(self) -> Place:
        """Where the rank is."""
        return self._place

    def at(self, step: int, phase: str, seconds: float | None) -> None:
        """The rank begins ``phase`` of ``step``, which may take ``seconds`` (None: any time)."""
        self._place = Place(self._rank, self._host, step, phase, time.time())
        self._started, self._seconds = time.monotonic(), seconds
        if self._file is not None:
            os.pwrite(self._file, json.dumps(asdict(self._place)).ljust(_RECORD_BYTES).encode(), 0)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            place, started, seconds = self._place, self._started, self._seconds
            if seconds is not None and place is self._place and time.monotonic() - started > seconds:
                message = f"{place}: no progress for {seconds:g} s"
                telling = threading.Thread(target=self._tell, args=(message,), daemon=True)
                telling.start()
                telling.join(_TELL_SECONDS)
                os._exit(1)

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=self._log)
        self._on_stall(message)
