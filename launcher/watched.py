"""Open MPI's ``mpirun`` under watch: once it ends its job it waits without limit for its daemon on every host, also on one that is gone.

Its keep-alive does not help while data is under way to that host, nor do ssh sessions that it keeps and loses, and it has no time-out of
its own for this.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ..engine.errors import LaunchError
from .local import caught_signals

_POLL_SECONDS = 0.1
# A rank says why it ends; what mpirun says (Open MPI 4 and 5) when it ends the others.
_TAG = rb"(?:[^<\n]{0,60}<std\w+>:?\s*)?"  # of --tag-output and --timestamp-output
_ENDING = re.compile(_TAG + rb"(?:sdp: error: |Primary job +terminated normally, but|\S+ (?:noticed|detected) that )")


class _Ending:
    """Forwards the standard error of a process, and notes when a line in it says that the job is being ended."""

    def __init__(self, stream: IO[bytes]):
        self.since: float | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for what is still to be forwarded; a process that was left behind may hold the stream open."""
        self._thread.join(seconds)

    def _forward(self) -> None:
        for line in self._stream:
            with contextlib.suppress(OSError):  # nobody reads any more; a full pipe would stop the launcher
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            if self.since is None and _ENDING.match(line):
                self.since = time.monotonic()


def run_watched(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> int:
    """Run ``command`` and return its exit code; it is killed ``seconds`` after it said that the job ends, or after a second signal.

    A first signal lets the ranks write a checkpoint, however long that takes. SIGINT, SIGTERM and SIGHUP to this process are passed on.
    Raises :class:`LaunchError` where the command cannot be started.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # in a process group of its own it is in the background of the terminal
    with caught_signals() as received:
        try:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0)
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert process.stderr is not None
        ending, passed_on = _Ending(process.stderr), 0
        while process.poll() is None:
            for number in received[passed_on:]:
                process.send_signal(number)
                passed_on += 1
                if passed_on > 1:
                    ending.since = ending.since or time.monotonic()
            if ending.since is not None and time.monotonic() - ending.since > seconds:
                process.kill()
                process.wait()
                text = f"sdp: {command[0]} still waits for a host {seconds:g} s after the job's end: killed"
                print(text, file=sys.stderr, flush=True)
                return 128 + received[0] if received else 1
            time.sleep(_POLL_SECONDS)
        ending.finish(_POLL_SECONDS * 10)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
