"""Runs a rank as the child of a witness, under a launcher that is not part of this package.

A killed process cannot report its own end, so the witness reports it. Without a witness only the
remaining ranks could report it, but MPICH's ``mpiexec`` kills them at once.

Processes that the rank starts end with the rank, and all of them end with the witness, even if the
witness is killed. To ensure this, the first process of their process group is a guard. It kills the
group as soon as the witness's end of a pipe is closed. This works on every system with a POSIX
shell, such as Linux and macOS. It cannot reach a process that leaves the group (``setsid``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.environment.child import child_environment
from ...engine.environment.launchers import PARENT_PID, WHEREABOUTS_FILE
from ...engine.errors import LaunchError
from ..fatal_errors import HOLD_BACK_SECONDS, PREFIX, described_end
from ..heartbeat import Whereabouts
from ..own_command import own_command, search_path

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Waits until no process has the other end of its pipe open. Then it kills its own group, including
# itself. It ignores other signals to the group.
_GUARD = ("/bin/sh", "-c", 'trap "" HUP INT TERM USR1; read -r _; kill -KILL 0')


def run_witnessed(
    argv: Sequence[str], settings: Mapping[str, str], rank: int, command: Sequence[str] | None = None
) -> int:
    """Run ``sdp`` in a child process and return its exit code, or 128 + the signal that ended it.

    Signals to this process are passed on to the child. If any other signal ends the child, this
    process reports that in one line.

    Args:
        argv: the arguments of ``sdp``.
        settings: variables to add to the child's environment.
        rank: the rank, for the report.
        command: the words to run in place of ``python -m sdp``.

    Raises:
        LaunchError: the child cannot be started.
    """
    # The file has no name, so a killed process cannot leave it behind.
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        whereabouts_file = Path(f"/dev/fd/{file.fileno()}")
        told = {PARENT_PID: str(os.getpid()), WHEREABOUTS_FILE: str(whereabouts_file)}
        passed_on: list[int] = []
        code = _run(
            [*(command or own_command()), *argv],
            child_environment({**search_path(), **settings, **told}, {}),
            passed_on,
        )
        whereabouts = Whereabouts.read(whereabouts_file)
    if code >= 0:
        return code
    if -code not in passed_on:
        if -code == signal.SIGABRT:  # libraries abort a process whose peer is gone
            time.sleep(HOLD_BACK_SECONDS)
        print(PREFIX + described_end(rank, code, whereabouts), file=sys.stderr, flush=True)
    return 128 - code


def _run(command: Sequence[str], environ: Mapping[str, str], passed_on: list[int]) -> int:
    """Run ``command`` and return its exit code, which is negative for a signal.

    ``passed_on`` collects the signals that this process sent to the command.
    """
    waiting: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int | None = None, _: object = None) -> None:
        waiting.extend([] if number is None else [number])
        while process is not None and waiting:
            passed_on.append(waiting.pop(0))
            # The process was not reaped, so its id is not reused. Popen.send_signal would reap it.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, passed_on[-1])

    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    quiet = subprocess.DEVNULL
    try:
        # The guard has none of the variables by which stop.py finds ranks.
        with subprocess.Popen(
            _GUARD, env={}, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0
        ) as guard:
            try:
                # The command is not in this process's group, so a signal to this group reaches it
                # only once. It keeps open descriptors, because one of them leads to MPI's daemon.
                process = subprocess.Popen(command, env=environ, process_group=guard.pid, close_fds=False)
                pass_on()
                return process.wait()
            finally:
                # Kill the group even if the guard was stopped or killed. Its id is not reused
                # before this process waits for it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(guard.pid, signal.SIGKILL)
    except OSError as error:
        raise LaunchError(f"{error.filename or command[0]} cannot be started: {error.strerror}") from None
