"""Records where a rank is in its run, and ends a rank that makes no progress.

A thread of the rank watches it. A process that is stopped, or stuck in a call that holds the GIL,
runs no thread. If no launcher of this package is above the rank, a small guard process watches it
too.
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

from ..engine.json_files import read_json_file
from .own_files import open_own_file

_LOOK_SECONDS = 0.5
_TELL_SECONDS = 10.0
SILENT_SECONDS = _TELL_SECONDS + 5.0  # the guard gives the rank's own thread this much more time
_RECORD_BYTES = 256  # all records have the same size, because each one overwrites the one before


# Reads lines "SECONDS WHEREABOUTS": the rank is alive, and may be silent for SECONDS (0: without
# limit). The guard ends with the rank, and ignores signals.
_GUARD = """
import os, select, signal, sys, time
for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
rank, end, whereabouts = int(sys.argv[1]), float("inf"), "starting"
while os.getppid() == rank:
    if select.select([0], [], [], max(0.0, min(5.0, end - time.monotonic())))[0]:
        lines = os.read(0, 65536).decode().splitlines()
        if not lines:
            break
        allowed, _, whereabouts = lines[-1].partition(" ")
        end = time.monotonic() + (float(allowed) or float("inf"))
    elif time.monotonic() >= end and os.getppid() == rank:
        print(f"sdp: error: {whereabouts}: the process is stopped or stuck: killed", file=sys.stderr, flush=True)
        os.kill(rank, signal.SIGKILL)
        break
"""


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is in its run.

    Attributes:
        rank: the number of the rank.
        host: the name of its host.
        step: the optimizer step that it is in or after.
        phase: what it does, in words.
        since: when the phase began, in seconds since the epoch.
    """

    rank: int
    host: str
    step: int
    phase: str
    since: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, step {self.step}, {self.phase}"

    @classmethod
    def read(cls, path: Path) -> Whereabouts | None:
        """Return what a rank last wrote to ``path``, or None."""
        try:
            return cls(**read_json_file(path, most_bytes=1 << 16))
        except (OSError, ValueError, TypeError):
            return None


class Heartbeat:
    """Watches the training loop, which says what it does next and how many seconds that may take.

    If a phase takes longer, the stacks of all threads are appended to ``log``, ``on_stall`` is
    called with a message, and the process ends. This works even if the file system hangs.

    Args:
        rank: the number of the rank.
        file: where the whereabouts are written, None for nowhere.
        log: the rank's log file.
        on_stall: called with a message if there is no progress.
        guarded: start a process that kills this one if it cannot end itself.
    """

    def __init__(
        self, rank: int, file: Path | None, log: Path, on_stall: Callable[[str], None], *, guarded: bool = False
    ):
        self._rank, self._host, self._on_stall = rank, socket.gethostname(), on_stall
        self._log = os.fdopen(open_own_file(log), "a", encoding="utf-8")
        self._file = _open_for_whereabouts(file) if file is not None else None
        self._whereabouts = Whereabouts(rank, self._host, 0, "starting", time.time())
        self._seconds: float | None = None
        self._started = time.monotonic()
        self._guard = _start_guard() if guarded else None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def whereabouts(self) -> Whereabouts:
        """Where the rank is."""
        return self._whereabouts

    @property
    def guard_pid(self) -> int | None:
        """The process id of the guard, or None."""
        return self._guard.pid if self._guard is not None else None

    def at(self, step: int, phase: str, seconds: float | None) -> None:
        """The rank begins ``phase`` of ``step``, which may take ``seconds`` (None: any time)."""
        self._whereabouts = Whereabouts(self._rank, self._host, step, phase, time.time())
        self._started, self._seconds = time.monotonic(), seconds
        self._tell_guard(self._whereabouts, seconds)
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk only the message for a hang suffers
                os.pwrite(self._file, json.dumps(asdict(self._whereabouts)).ljust(_RECORD_BYTES).encode(), 0)

    def stop(self) -> None:
        """Watch no longer: the process goes on with other work after the run."""
        self._stopped.set()
        self._thread.join()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
        self._log.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            whereabouts, started, seconds = self._whereabouts, self._started, self._seconds
            self._tell_guard(whereabouts, seconds)
            is_same = whereabouts is self._whereabouts
            is_late = seconds is not None and time.monotonic() - started > seconds
            if is_late and is_same and not self._stopped.is_set():
                self._end(f"no progress for {seconds:g} s")

    def _end(self, reason: str) -> None:
        """End the process with exit code 1, for a reason such as "no progress for 600 s"."""
        telling = threading.Thread(target=self._tell, args=(f"{self._whereabouts}: {reason}",), daemon=True)
        telling.start()
        telling.join(_TELL_SECONDS)
        os._exit(1)

    def _tell_guard(self, whereabouts: Whereabouts, seconds: float | None) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            allowed = 0.0 if seconds is None else seconds + SILENT_SECONDS
            with contextlib.suppress(OSError):  # somebody ended or stopped the guard
                os.write(self._guard.stdin.fileno(), f"{allowed} {whereabouts}\n".encode())

    def _tell(self, message: str) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=self._log)
        self._on_stall(message)


def _open_for_whereabouts(file: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    # An entry of /dev/fd is a link to a file that the witness has opened.
    return os.open(file, flags) if file.parent == Path("/dev/fd") else open_own_file(file, flags)


def _start_guard() -> subprocess.Popen[bytes]:
    """Start the process that watches this one. It ends when this one ends."""
    words = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    # In its own process group: signals of a terminal or a launcher to the rank's group must not
    # reach it.
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    assert guard.stdin is not None
    os.set_blocking(guard.stdin.fileno(), False)
    return guard
