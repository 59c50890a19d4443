"""Runs a launcher for several hosts and watches it.

After a signal, the ranks have time for a checkpoint. The launcher ends when its job has ended.
Without this file, Open MPI's ``mpirun`` kills ranks one second after SIGTERM. It also waits without
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
from ..fatal_errors import names_lost_rank, say
from ..restarts import End
from ..signals import CAUGHT, GRACE_SECONDS, handled

_POLL_SECONDS = 0.1
# The start of a line, as mpirun's --tag-output and --timestamp-output or pdsh write it.
_TAG = rb"(?:[^<\n]{0,60}<std\w+>:?\s*|[\w.-]+: )?"
# A line that says that the job ends: a rank's reason, or what mpirun (Open MPI 4 and 5) says when
# it ends the other ranks.
_ENDING = re.compile(
    _TAG + rb"(?:sdp: error: (?P<reason>.*)|Primary job +terminated normally, but|\S+ (?:noticed|detected) that )"
)
# Passes a signal on to the ranks of a running launcher. The last argument is True if the ranks must
# end at once.
PassOn = Callable[[subprocess.Popen[bytes], int, bool], object]


class _Ending:
    """Forwards the standard error of a process, and records when a line says that the job ends."""

    def __init__(self, stream: IO[bytes]):
        self.since: float | None = None
        self.reason = ""  # of the first rank that said one
        self._stream = stream
        self.thread = threading.Thread(target=self._forward, daemon=True)
        self.thread.start()

    def _forward(self) -> None:
        for line in self._stream:
            # If nobody reads the output any more, go on reading: a full pipe would block the
            # launcher.
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            if (found := _ENDING.match(line)) is not None:
                self.since = self.since or time.monotonic()
                self.reason = self.reason or (found["reason"] or b"").decode(errors="replace")


def pass_on_by_mpirun(process: subprocess.Popen[bytes], number: int, at_once: bool) -> None:
    """Send the launcher SIGUSR1, or signal ``number`` if ``at_once``.

    Open MPI, MPICH and Intel MPI pass SIGUSR1 on to the ranks. SIGINT and SIGTERM make them end the
    job.
    """
    process.send_signal(number if at_once else signal.SIGUSR1)


def pass_on_by(stop: Callable[[int], Sequence[str]], environ: Mapping[str, str]) -> PassOn:
    """Pass a signal on with the command ``stop(number)``, and not through the launcher."""
    quiet = subprocess.DEVNULL
    return lambda _, number, at_once: subprocess.Popen(
        stop(signal.SIGKILL if at_once else number), env=environ, stdin=quiet, stdout=quiet, process_group=0
    )


def run_watched(
    command: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
    received: Sequence[int],
    pass_on: PassOn = pass_on_by_mpirun,
    *,
    ends_ranks: bool = False,
) -> End:
    """Run the launcher ``command``, and return its exit code and whether a rank or host was lost.

    Signals to this process reach the ranks through ``pass_on``. After the first signal the ranks
    may write a checkpoint, however long that takes. The second one ends the job. The exit code is
    then 128 + the signal, unless the ranks fail.

    Args:
        command: the command of the launcher.
        environ: the environment of the launcher.
        seconds: the launcher is killed so long after it printed that the job ends, or after a
            second signal.
        received: the signals to this process, see :func:`~sdp.launcher.signals.caught_signals`.
        pass_on: passes a signal on to the ranks.
        ends_ranks: whether to end ranks through ``pass_on`` some seconds after the end of the job.
            This is for launchers that do not end ranks that hang, such as stopped ones.

    Raises:
        LaunchError: the command cannot be started.
    """
    # The launcher has its own process group, so it is in the background of the terminal.
    with handled((signal.SIGTTOU,), signal.SIG_IGN):
        try:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        assert process.stderr is not None
        ending, passed_on = _Ending(process.stderr), 0
        while process.poll() is None:
            for number in received[passed_on:]:
                pass_on(process, number, passed_on > 0)
                passed_on += 1
            if passed_on > 1 and ending.since is None:
                ending.since = time.monotonic()
            ended = time.monotonic() - ending.since if ending.since is not None else 0.0
            if ends_ranks and ended > GRACE_SECONDS:
                pass_on(process, signal.SIGTERM, True)
                ends_ranks = False
            if ended > seconds:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                say(f"{command[0]} still waited for a host {seconds:g} s after the end of the job, and was killed")
                return End(128 + received[0], is_loss=False) if received else End(1, is_loss=True)
            time.sleep(_POLL_SECONDS)
        ending.thread.join(_POLL_SECONDS * 10)  # a process that was left behind may hold the stream open
    code = process.returncode
    # 1 and 2 are the codes of a failed sdp. MPICH may return 0 after a signal, whatever its ranks
    # return.
    if received and code not in (1, 2):
        return End(128 + received[0], is_loss=False)
    code = code if code >= 0 else 128 - code
    stopped = code in (0, 2, *(128 + number for number in CAUGHT))
    return End(code, not stopped and (not ending.reason or names_lost_rank(ending.reason)))
