"""A launcher over several hosts under watch: signals leave its ranks time for a checkpoint, and it ends when its job has ended.

Open MPI's ``mpirun`` kills ranks a second after SIGTERM, and waits without limit for its daemon on every host, also on one that is gone.

Its keep-alive does not help while data is under way to that host, nor do ssh sessions that it keeps and loses, and it has no time-out of
its own for this.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ...engine.errors import LaunchError
from ..signals import GRACE_SECONDS, caught_signals

_POLL_SECONDS = 0.1
# A rank says why it ends; what mpirun says (Open MPI 4 and 5) when it ends the others.
_TAG = rb"(?:[^<\n]{0,60}<std\w+>:?\s*|[\w.-]+: )?"  # of --tag-output and --timestamp-output, and of pdsh
# Says to the ranks of a started launcher, after a signal to this process, that they are to end; True for a second signal, in a hurry.
Tell = Callable[[subprocess.Popen[bytes], int, bool], None]
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


def tell_by_mpirun(process: subprocess.Popen[bytes], number: int, hurry: bool) -> None:
    """Open MPI, MPICH and Intel MPI pass SIGUSR1 on to the ranks; of SIGINT and SIGTERM they make the end of the job."""
    process.send_signal(number if hurry else signal.SIGUSR1)


def tell_by(stop: Callable[[int], Sequence[str]], environ: Mapping[str, str]) -> Tell:
    """Pass the signal on with the command ``stop(number)``. The launcher need not know of the signal."""

    def tell(process: subprocess.Popen[bytes], number: int, hurry: bool) -> None:
        command = stop(signal.SIGKILL if hurry else number)
        subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)

    return tell


def run_watched(
    command: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
    tell: Tell = tell_by_mpirun,
    *,
    kills: bool = False,
) -> int:
    """Run ``command`` and return its exit code; it is killed ``seconds`` after it said that the job ends, or after a second signal.

    ``kills``: the launcher leaves ranks that do not end (one that is stopped, say) to themselves, so they are killed by ``tell``
    some seconds after the job's end was said.

    SIGINT, SIGTERM and SIGHUP to this process reach the ranks by ``tell``. A first signal lets them write a checkpoint, however long that
    takes; the exit code is then 128 + the signal, unless the ranks fail. Raises :class:`LaunchError` where the command cannot be
    started.
    """
    signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # in a process group of its own it is in the background of the terminal
    with caught_signals() as received:
        try:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert process.stderr is not None
        ending, passed_on, killed = _Ending(process.stderr), 0, not kills
        while process.poll() is None:
            for number in received[passed_on:]:
                tell(process, number, passed_on > 0)
                passed_on += 1
                if passed_on > 1:
                    ending.since = ending.since or time.monotonic()
            if not killed and ending.since is not None and time.monotonic() - ending.since > GRACE_SECONDS:
                tell(process, signal.SIGKILL, True)
                killed = True
            if ending.since is not None and time.monotonic() - ending.since > seconds:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                text = f"sdp: {command[0]} still waits for a host {seconds:g} s after the job's end: killed"
                print(text, file=sys.stderr, flush=True)
                return 128 + received[0] if received else 1
            time.sleep(_POLL_SECONDS)
        ending.finish(_POLL_SECONDS * 10)
    if received and process.returncode not in (
        1,
        2,
    ):  # not what sdp fails with; MPICH may say 0 after a signal, whatever its ranks say
        return 128 + received[0]
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
