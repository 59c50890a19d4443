"""Runs a launcher for several hosts, and makes sure that the launcher ends with its job.

After a signal, ranks get the time to write a checkpoint: Open MPI's ``mpirun`` by itself would kill
ranks one second after SIGTERM. A launcher that still runs long after the end of its job is killed,
because ``mpirun`` may wait forever for a host that is gone.
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
        self.reason = ""  # the first error that a rank printed
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
    """Pass a signal on to the ranks of ``mpirun``, as SIGUSR1.

    Open MPI, MPICH and Intel MPI pass SIGUSR1 on to ranks. SIGINT and SIGTERM make ``mpirun`` end
    the job. So signal ``number`` itself is sent only if ranks must end ``at_once``.
    """
    process.send_signal(number if at_once else signal.SIGUSR1)


def pass_on_by(stop: Callable[[int], Sequence[str]], environ: Mapping[str, str]) -> PassOn:
    """Return a function that sends ranks a signal ``number`` with the command ``stop(number)``."""
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

    Signals to this process are passed on to the ranks. After the first signal, ranks may take any
    time to write a checkpoint. The second signal ends the job. After a signal, the exit code is 128
    + the number of the first signal, unless the ranks fail.

    Args:
        command: the command of the launcher.
        environ: the environment of the launcher.
        seconds: how long the launcher may still run after it printed that the job ends, or after a
            second signal. Then it is killed.
        received: the signals to this process, see :func:`~sdp.launcher.signals.caught_signals`.
        pass_on: passes a signal on to the ranks.
        ends_ranks: whether to kill ranks that still run some seconds after the end of the job, for
            a launcher that does not do this itself.

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
