"""A rank under a launcher that is not ours, with a witness: what a process that is killed cannot say, the one above it says.

Without one only the ranks that are left could tell, and MPICH's ``mpiexec`` kills them at once.

What the rank starts ends with it, and both with the witness, also where that is killed: the first of their process group is a guard, which
kills the group once the witness's end of a pipe is closed. That is so on every system with a POSIX shell, Linux and macOS; on none is
what leaves the group (``setsid``) in reach.
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
from ...engine.environment.detect import PARENT_PID, WHEREABOUTS_FILE
from ...engine.errors import LaunchError
from ..heartbeat import Whereabouts
from ..own_command import own_command, search_path
from ..supervision import HOLD_BACK_SECONDS, PREFIX, described_end

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Waits until nobody has the other end of its pipe, then kills its own group, itself too. Other signals to the group are not for it.
_GUARD = ("/bin/sh", "-c", 'trap "" HUP INT TERM USR1; read -r _; kill -KILL 0')


def run_witnessed(
    argv: Sequence[str], settings: Mapping[str, str], rank: int, command: Sequence[str] | None = None
) -> int:
    """Run ``sdp`` with ``argv`` and ``settings`` in its environment in a process of its own, and return its exit code, 128 + a signal's.

    Signals to this process reach that one; where another one ends it, this process says so in one line. ``command`` replaces
    ``python -m sdp``. Raises :class:`LaunchError` where it cannot be started.
    """
    with tempfile.TemporaryFile() as file:  # without a name that a process which is killed could leave behind
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
        if -code == signal.SIGABRT:  # as communication libraries end a process whose peer is gone
            time.sleep(HOLD_BACK_SECONDS)
        print(PREFIX + described_end(rank, code, whereabouts), file=sys.stderr, flush=True)
    return 128 - code


def _run(command: Sequence[str], environ: Mapping[str, str], passed_on: list[int]) -> int:
    """The exit code of ``command``, below zero for a signal; ``passed_on`` collects the signals that it was sent from here."""
    waiting: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int | None = None, _: object = None) -> None:
        waiting.extend([] if number is None else [number])
        while process is not None and waiting:
            passed_on.append(waiting.pop(0))
            if process.returncode is None:  # not reaped, so its id is no other's; Popen.send_signal would reap it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, passed_on[-1])

    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    quiet = subprocess.DEVNULL
    try:
        # Without the variables by which ranks are found (stop.py).
        with subprocess.Popen(
            _GUARD, env={}, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0
        ) as guard:
            try:
                # Not in this process's group, so that a signal to that one comes once. Open descriptors stay: one leads to MPI's daemon.
                process = subprocess.Popen(command, env=environ, process_group=guard.pid, close_fds=False)
                pass_on()
                return process.wait()
            finally:  # also where somebody has stopped or killed the guard, whose id nobody else has before it is waited for
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(guard.pid, signal.SIGKILL)
    except OSError as error:
        raise LaunchError(f"{error.filename or command[0]} cannot be started: {error.strerror}") from None
