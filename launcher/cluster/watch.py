"""Runs a launcher for several hosts and watches it.

A signal leaves the ranks time for a checkpoint, and the launcher ends when its job has ended.
Without this, Open MPI's ``mpirun`` kills ranks one second after SIGTERM. It also waits without
limit for its daemon on every host, even if the host is gone. It has no time-out for this. Its
keep-alive does not help while data is in flight to that host. The ssh sessions that it opens do not
help either.
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
from ..signals import GRACE_SECONDS, caught_signals, ignored

_POLL_SECONDS = 0.1
# The start of a line, as mpirun's --tag-output and --timestamp-output or pdsh write it.
_TAG = rb"(?:[^<\n]{0,60}<std\w+>:?\s*|[\w.-]+: )?"
# After a signal to this process, tells the ranks of a running launcher to end. The last argument is
# True from the second signal on, when the ranks must end at once.
Tell = Callable[[subprocess.Popen[bytes], int, bool], None]
# A line that says that the job ends: a rank's reason, or what mpirun (Open MPI 4 and 5) says when
# it ends the other ranks.
_ENDING = re.compile(_TAG + rb"(?:sdp: error: |Primary job +terminated normally, but|\S+ (?:noticed|detected) that )")


class _Ending:
    """Forwards the standard error of a process, and notes when a line says that the job ends."""

    def __init__(self, stream: IO[bytes]):
        self.since: float | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the rest of the stream.

        A process that was left behind may hold the stream open.
        """
        self._thread.join(seconds)

    def _forward(self) -> None:
        for line in self._stream:
            # If nobody reads the output any more, go on reading: a full pipe would block the
            # launcher.
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            if self.since is None and _ENDING.match(line):
                self.since = time.monotonic()


def tell_by_mpirun(process: subprocess.Popen[bytes], number: int, hurry: bool) -> None:
    """Send the launcher SIGUSR1, or signal ``number`` if ``hurry``.

    Open MPI, MPICH and Intel MPI pass SIGUSR1 on to the ranks. SIGINT and SIGTERM make them end the
    job.
    """
    process.send_signal(number if hurry else signal.SIGUSR1)


def tell_by(stop: Callable[[int], Sequence[str]], environ: Mapping[str, str]) -> Tell:
    """Pass a signal on with the command ``stop(number)``, without the help of the launcher."""

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
    """Run the launcher ``command`` and return its exit code.

    SIGINT, SIGTERM and SIGHUP to this process reach the ranks through ``tell``. After the first
    signal the ranks may write a checkpoint, however long that takes. The exit code is then 128 +
    the signal, unless the ranks fail.

    Args:
        command: the command of the launcher.
        environ: the environment of the launcher.
        seconds: the launcher is killed this long after it said that the job ends, or after a second
            signal.
        tell: passes a signal on to the ranks.
        kills: kill the ranks through ``tell`` some seconds after the job was said to end. This is
            for a launcher that does not end ranks which do not end themselves, such as a stopped
            one.

    Raises:
        LaunchError: the command cannot be started.
    """
    # The launcher has its own process group, so it is in the background of the terminal.
    with ignored(signal.SIGTTOU), caught_signals() as received:
        launcher = _Launcher(command, environ, tell, kills=kills)
        while launcher.process.poll() is None:
            launcher.pass_on(received)
            launcher.kill_ranks_left()
            if launcher.has_ended_for(seconds):
                launcher.kill()
                text = f"sdp: {command[0]} still waits for a host {seconds:g} s after the job's end: killed"
                print(text, file=sys.stderr, flush=True)
                return 128 + received[0] if received else 1
            time.sleep(_POLL_SECONDS)
        launcher.ending.finish(_POLL_SECONDS * 10)
    return _exit_code(launcher.process.returncode, received)


class _Launcher:
    """A running launcher.

    Attributes:
        process: its process.
        ending: notes when it says that the job ends.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], tell: Tell, *, kills: bool):
        try:
            self.process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert self.process.stderr is not None
        self.ending = _Ending(self.process.stderr)
        self._tell, self._passed_on, self._must_kill = tell, 0, kills

    def pass_on(self, received: Sequence[int]) -> None:
        """Tell the ranks the signals that came since the last call. The second one ends the job."""
        for number in received[self._passed_on :]:
            self._tell(self.process, number, self._passed_on > 0)
            self._passed_on += 1
            if self._passed_on > 1:
                self.ending.since = self.ending.since or time.monotonic()

    def kill_ranks_left(self) -> None:
        """Kill ranks that do not end by themselves, once and some seconds after the job was said to
        end.
        """
        if self._must_kill and self.has_ended_for(GRACE_SECONDS):
            self._tell(self.process, signal.SIGKILL, True)
            self._must_kill = False

    def has_ended_for(self, seconds: float) -> bool:
        """Whether the job was said to end more than ``seconds`` ago."""
        return self.ending.since is not None and time.monotonic() - self.ending.since > seconds

    def kill(self) -> None:
        """Kill the launcher and what it started here."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _exit_code(code: int, received: Sequence[int]) -> int:
    # 1 and 2 are the codes of a failed sdp. MPICH may return 0 after a signal, whatever its ranks
    # return.
    if received and code not in (1, 2):
        return 128 + received[0]
    return code if code >= 0 else 128 - code
