"""Starts the ranks of a run as processes on this host, watches them, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine.environment.detect import LISTENING_SOCKET, LOOPBACK, export, free_port, local_environment, set_default
from ..engine.environment.process import allocator_settings, child_environment, loopback_settings, thread_settings
from ..engine.errors import WriteError
from ..engine.files import open_own_file
from .fatal_errors import FatalError, described_end, say, show
from .rank_process import RankProcess, own_command, search_path
from .restarts import End, run_again
from .signals import CAUGHT, GRACE_SECONDS, caught_signals

_POLL_SECONDS = 0.05
# A rank that fails breaks the collectives of other ranks, which fail too. This long after the first
# failure, all failures are compared, so that the cause is reported and not its consequences.
_SETTLE_SECONDS = 0.5


def start_local(
    argv: Sequence[str],
    processes: int,
    log_dir: Path,
    *,
    on_cpu: bool = True,
    grace_seconds: float = GRACE_SECONDS,
    stop_seconds: float | None = None,
    restarts: int = 0,
    command: Sequence[str] | None = None,
) -> int:
    """Run ``sdp`` in several processes on this host, and return the exit code of the run.

    Rank 0 writes to this process's terminal. The output of rank R > 0 is appended to
    ``log_dir/rank-R.log``. If a rank fails, or if this process gets SIGINT, SIGTERM, SIGHUP or
    SIGUSR1, the other ranks get a signal. Ranks that do not end in time are killed. A second signal
    kills all ranks at once.

    Args:
        argv: the words that follow ``sdp``.
        processes: how many ranks to start.
        log_dir: the directory of the logs.
        on_cpu: whether to set up glibc's allocator for ranks that compute on a CPU.
        grace_seconds: how long ranks may run on after a rank has failed.
        stop_seconds: how long ranks may run on after a signal to this process, for example to write
            a checkpoint. If None, ``grace_seconds``.
        restarts: how often a run that loses a rank starts again from its newest checkpoint.
        command: what to run in place of ``python -m sdp``.

    Returns:
        The exit code:

        - 0: all ranks succeeded.
        - 2: the rank that failed first ended with 2, a mistake of the user.
        - 128 + the signal: a signal to this process or to a rank ended the run, and no rank
          reported an error.
        - 1: any other failure.

    Raises:
        LaunchError: a process cannot be started, or its log cannot be written.
    """
    stop_seconds = grace_seconds if stop_seconds is None else stop_seconds
    with caught_signals() as received:

        def start(words: Sequence[str]) -> End:
            ranks: list[RankProcess] = []
            try:
                _start_all(ranks, [*(command or own_command()), *argv, *words], processes, log_dir, on_cpu=on_cpu)
                return _supervise(ranks, received, grace_seconds, stop_seconds)
            finally:
                _kill(ranks)
                for rank in ranks:
                    rank.forget()

        return run_again(start, restarts, received)


def become_single() -> None:
    """Set the environment variables with which this process is the only rank of a run."""
    for name, value in loopback_settings().items():
        set_default(name, value)
    export(local_environment(0, 1, free_port()).variables())


def _start_all(
    ranks: list[RankProcess], command: Sequence[str], processes: int, log_dir: Path, *, on_cpu: bool
) -> None:
    """Append started ranks to ``ranks``, so that the caller can end them if a start fails."""
    settings = {**search_path(), **thread_settings(processes)}
    defaults = loopback_settings() | (allocator_settings() if on_cpu else {})
    # Rank 0 inherits the socket on which it serves torch's store. No other process can take the
    # port in between.
    with socket.create_server((LOOPBACK, 0)) as listening:
        port, handle = listening.getsockname()[1], listening.fileno()
        for rank in range(processes):
            variables = local_environment(rank, processes, port).variables()
            variables |= {LISTENING_SOCKET: str(handle)} if rank == 0 else {}
            environ = child_environment({**settings, **variables}, defaults)
            ranks.append(RankProcess.start(rank, command, environ, log_dir, [handle] if rank == 0 else []))


def _supervise(ranks: Sequence[RankProcess], received: list[int], grace_seconds: float, stop_seconds: float) -> End:
    """Wait until the ranks have ended, and print the cause of a failure."""
    wait(ranks, lambda: bool(received) or any(rank.failure() for rank in ranks))
    if not received:
        wait(ranks, lambda: bool(received), _SETTLE_SECONDS)
    failures = [(rank, failure) for rank in ranks if (failure := rank.failure())]
    suspect = _suspect(ranks) if any(failure.stalled for _, failure in failures) else ""
    # A signal that comes while failed ranks are being ended is not the cause.
    # If one rank gets a signal, all ranks save a checkpoint and end with 128 + the signal's number.
    codes = {failure.exit_code for _, failure in failures}
    number = received[0] if received else next((number for number in CAUGHT if codes == {128 + number}), 0)
    if received:
        say(f"{signal.Signals(number).name} received, ending {len(ranks)} processes (a second signal kills them)")
    known = len(received)
    for rank in ranks:
        if not rank.has_ended():
            rank.send_signal(number or signal.SIGTERM)
    wait(ranks, lambda: len(received) > known, stop_seconds if received else grace_seconds)
    _kill(ranks)
    if number:
        # A rank may report that it could not write its checkpoint. Reports that peers are gone do
        # not count, because all ranks end.
        reports = [(rank, report) for rank in ranks if (report := rank.report())]
        failures = [(rank, report) for rank, report in reports if report.is_known]
    return End(128 + number, is_loss=False) if number and not failures else _report(failures, suspect)


def wait(ranks: Sequence[RankProcess], until: Callable[[], bool], seconds: float = float("inf")) -> None:
    """Wait until every rank has ended or ``until()`` is true, but at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while [rank for rank in ranks if not rank.has_ended()]:
        if until() or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _kill(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        if not rank.has_ended():
            rank.kill()
    wait(ranks, lambda: False)


def _suspect(ranks: Sequence[RankProcess]) -> str:
    """Describe the rank that probably hangs. Another rank may have reported it."""
    stopped = [process for process in ranks if process.is_stopped()]
    if stopped:
        return f"; stopped: {stopped[0].position or f'rank {stopped[0].rank}'}"
    known = [position for process in ranks if (position := process.position)]
    behind = min(known, key=lambda position: (position.step, position.since), default=None)
    return f"; the furthest behind: {behind}" if behind else ""


def _report(failures: Sequence[tuple[RankProcess, FatalError]], suspect: str) -> End:
    """Print in one message which rank failed first, and why. Returns how the run ended."""
    if not failures:
        return End(0, is_loss=False)
    process, failure = min(failures, key=lambda item: _lateness(*item))
    if process.rank == 0 and failure.text:
        with (
            contextlib.suppress(OSError, WriteError),
            os.fdopen(open_own_file(process.log), "a", encoding="utf-8") as log,
        ):
            log.write(failure.text.rstrip() + "\n")
    if failure.exit_code == 2:
        if failure.text:
            show(failure.text)
        return End(2, is_loss=False)
    lines = failure.text.strip().splitlines() or [""]
    if process.rank == 0 and len(lines) > 1:
        show(failure.text.rstrip())
    reason = f" ({lines[-1].removeprefix('sdp: error: ')}{suspect})" if lines[-1] else ""
    say(f"error: {described_end(process.rank, failure.exit_code, process.position)}{reason}; its log: {process.log}")
    return End(1, failure.is_loss)


def _lateness(process: RankProcess, failure: FatalError) -> tuple[bool, bool, float, int]:
    """A key that sorts causes before consequences.

    A rank that was killed from outside is a cause. An exception is SIGABRT, with which
    communication libraries end a process when its peer is gone. A user's mistake is a cause too. Of
    the other ranks, the first report counts.
    """
    killed = failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT
    return not killed, failure.exit_code != 2, failure.time, process.rank
