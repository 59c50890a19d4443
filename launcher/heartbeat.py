"""Where a rank is in its run: written down for whoever watches it, and watched by a thread of its own for a rank that hangs.

A process that is stopped, or stuck in a call that holds the interpreter's lock, has no thread that could watch it: where no launcher of
ours is above it, a small process beside it does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0
_SILENT_SECONDS = (
    _TELL_SECONDS + 5.0
)  # beyond what a phase may take, until the guard ends a rank whose own thread does not
_RECORD_BYTES = 256  # every record overwrites the one before, so all have one size


# Reads "SECONDS PLACE" lines: the rank lives, and may be silent for so long (0: for ever). Ends with the rank, and no signal is for it.
_GUARD = """
import os, select, signal, sys, time
for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
rank, end, place = int(sys.argv[1]), float("inf"), "starting"
while os.getppid() == rank:
    if select.select([0], [], [], max(0.0, min(5.0, end - time.monotonic())))[0]:
        lines = os.read(0, 65536).decode().splitlines()
        if not lines:
            break
        allowed, _, place = lines[-1].partition(" ")
        end = time.monotonic() + (float(allowed) or float("inf"))
    elif time.monotonic() >= end and os.getppid() == rank:
        print(f"sdp: error: {place}: its process does not run, for it is stopped or stuck: killed", file=sys.stderr, flush=True)
        os.kill(rank, signal.SIGKILL)
        break
"""


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
    ``guarded``: a process beside this one kills it where it cannot end itself.
    """

    def __init__(
        self, rank: int, file: Path | None, log: Path, on_stall: Callable[[str], None], *, guarded: bool = False
    ):
        self._rank, self._host, self._on_stall = rank, socket.gethostname(), on_stall
        self._log = log.open("a", encoding="utf-8")
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if file is not None else None
        self._place = Place(rank, self._host, 0, "starting", time.time())
        self._seconds: float | None = None
        self._started = time.monotonic()
        self._guard = _start_guard() if guarded else None
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    @property
    def place(self) -> Place:
        """Where the rank is."""
        return self._place

    def at(self, step: int, phase: str, seconds: float | None) -> None:
        """The rank begins ``phase`` of ``step``, which may take ``seconds`` (None: any time)."""
        self._place = Place(self._rank, self._host, step, phase, time.time())
        self._started, self._seconds = time.monotonic(), seconds
        self._tell_guard(self._place, seconds)
        if self._file is not None:
            os.pwrite(self._file, json.dumps(asdict(self._place)).ljust(_RECORD_BYTES).encode(), 0)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            place, started, seconds = self._place, self._started, self._seconds
            self._tell_guard(place, seconds)
            if seconds is not None and place is self._place and time.monotonic() - started > seconds:
                message = f"{place}: no progress for {seconds:g} s"
                telling = threading.Thread(target=self._tell, args=(message,), daemon=True)
                telling.start()
                telling.join(_TELL_SECONDS)
                os._exit(1)

    def _tell_guard(self, place: Place, seconds: float | None) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            allowed = 0.0 if seconds is None else seconds + _SILENT_SECONDS
            with contextlib.suppress(OSError):  # somebody ended or stopped it
                os.write(self._guard.stdin.fileno(), f"{allowed} {place}\n".encode())

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=self._log)
        self._on_stall(message)


def _start_guard() -> subprocess.Popen[bytes]:
    """Start the process that watches this one, and that ends with it."""
    words = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    # In a group of its own: what a terminal or a launcher sends to the rank's is not for it.
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    assert guard.stdin is not None
    os.set_blocking(guard.stdin.fileno(), False)
    return guard
