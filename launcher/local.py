"""Start the ranks of a run as processes on this host, watch them, and leave none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.environment.child import allocator_settings, child_environment, search_path_settings, thread_settings
from ..engine.environment.detect import ERROR_FILE, PARENT_PID, PLACE_FILE, free_port, local_environment, publish
from ..engine.errors import LaunchError
from .heartbeat import Place
from .signals import GRACE_SECONDS, caught_signals
from .supervision import FatalError, described_end

PACKAGE = __name__.partition(".")[0]  # ``sdp``
_POLL_SECONDS = 0.05
# Failures come in company: a rank that fails breaks the collectives of the others. This long after the first, those
# that have ended are compared, so that the cause is reported and not what followed from it.
_SETTLE_SECONDS = 0.5
_LAST_LOG_BYTES = 4096
# glibc's <malloc.h>
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_ARENA_MAX": -8}


@dataclass
class _Rank:
    """One started process; ``log_start`` is where this run's part of an appended log begins (bytes)."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    error_file: Path
    place_file: Path

    def ended(self) -> bool:
        """Has the process ended? Then whatever it started and left in its process group is ended as well."""
        if self.process.returncode is None and _has_exited(self.process):
            self.kill()  # before the process is reaped: afterwards its group id could be another's
            self.process.wait()
        return self.process.returncode is not None

    def failure(self) -> FatalError | None:
        """Why it failed, if it did: by its own report, which may come before its end, or by its exit status."""
        code = self.process.returncode
        if code == 0:
            return None
        report = FatalError.read(self.error_file)
        if report is not None or code is None:
            return report
        return FatalError(code, self._last_log_line(), time.time())

    @property
    def place(self) -> Place | None:
        """Where it said last that it is."""
        return Place.read(self.place_file)

    def is_stopped(self) -> bool:
        """Whether the process exists but does not run (SIGSTOP, a debugger)."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_log_line(self) -> str:
        """The last line that a rank above 0 logged in this run; rank 0's is on the terminal."""
        if self.rank == 0:
            return ""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, size - _LAST_LOG_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def start_local(
    argv: Sequence[str],
    processes: int,
    log_dir: Path,
    *,
    on_cpu: bool = True,
    grace_seconds: float = GRACE_SECONDS,
    stop_seconds: float | None = None,
    command: Sequence[str] | None = None,
) -> int:
    """Run ``sdp`` with ``argv`` in ``processes`` processes on this host and return the exit code of the whole.

    Rank 0 keeps this process's terminal; the output of rank R > 0 is appended to ``log_dir/rank-R.log``. When a rank
    fails, or this process gets SIGINT, SIGTERM or SIGHUP, the others are told by a signal and killed ``grace_seconds``
    later; after a signal to this process ``stop_seconds`` later (default: the same), so that a checkpoint can be written.
    The exit code is 0, 2 if the rank that failed first ended with 2 (the user's mistake), 1 for other failures,
    or 128 + the signal; where a rank fails on its way out after a signal and says why, its code. ``command`` replaces
    ``python -m sdp``.
    Raises :class:`LaunchError` where a process or log cannot be started.
    """
    threads = thread_settings(processes)
    defaults = allocator_settings() if on_cpu else {}
    settings = {**search_path(), **threads}
    port = free_port()
    ranks: list[_Rank] = []
    with caught_signals() as received:
        try:
            for rank in range(processes):
                place = local_environment(rank, processes, port).variables()
                environ = child_environment({**settings, **place}, defaults)
                ranks.append(_start(rank, [*(command or own_command()), *argv], environ, log_dir))
            _wait(ranks, lambda: bool(received) or any(rank.failure() for rank in ranks))
            if not received:
                _wait(ranks, lambda: bool(received), _SETTLE_SECONDS)
            failures = [(rank, failure) for rank in ranks if (failure := rank.failure())]
            suspect = _suspect(ranks) if any(failure.stalled for _, failure in failures) else ""
            interrupted = bool(received)  # a signal that comes while failed ranks are being ended is no cause
            if interrupted:
                _say(f"{signal.Signals(received[0]).name} received, ending {processes} processes (again: kill them)")
        finally:
            _end(ranks, received, stop_seconds if received and stop_seconds is not None else grace_seconds)
        if (
            interrupted
        ):  # what a rank says on its way out (no room for the checkpoint) is told; that its peers are gone is not
            failures = [
                (rank, report) for rank in ranks if (report := FatalError.read(rank.error_file)) and report.is_known
            ]
        exit_code = 128 + received[0] if interrupted and not failures else _report(failures, suspect)
        for rank in ranks:
            rank.error_file.unlink(missing_ok=True)
            rank.place_file.unlink(missing_ok=True)
    return exit_code


def become_single(*, on_cpu: bool = True) -> None:
    """Make this process a run of one rank; on a CPU with the allocator settings that started ranks have."""
    if on_cpu:
        _tune_allocator()
    publish(local_environment(0, 1, free_port()))


def _start(rank: int, command: Sequence[str], environ: dict[str, str], log_dir: Path) -> _Rank:
    log, error_file = log_dir / f"rank-{rank}.log", log_dir / f"rank-{rank}.{os.getpid()}.error"
    place_file = error_file.with_suffix(".place")
    environ |= {PARENT_PID: str(os.getpid())}
    environ |= {ERROR_FILE: str(error_file.absolute()), PLACE_FILE: str(place_file.absolute())}
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        error_file.unlink(missing_ok=True)
        place_file.unlink(missing_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else output,
                stderr=None if rank == 0 else subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches this process alone, which forwards it once
            )
            return _Rank(rank, process, log, output.tell(), error_file, place_file)
    except OSError as error:
        raise LaunchError(f"rank {rank} cannot be started with its log in {log_dir}: {error}") from None


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(ranks: Sequence[_Rank], until: Callable[[], bool], seconds: float = float("inf")) -> None:
    """Return when every rank has ended, ``until`` holds, or the time is over."""
    deadline = time.monotonic() + seconds
    while [rank for rank in ranks if not rank.ended()]:
        if until() or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[_Rank], received: list[int], grace_seconds: float) -> None:
    """Ask the ranks that still run to end, then kill them; a second signal shortens the wait."""
    for rank in ranks:
        if not rank.ended():
            rank.process.send_signal(received[0] if received else signal.SIGTERM)
    known = len(received)
    _wait(ranks, lambda: len(received) > known, grace_seconds)
    for rank in ranks:
        if not rank.ended():
            rank.kill()
    _wait(ranks, lambda: False)


def _suspect(ranks: Sequence[_Rank]) -> str:
    """Ranks wait for each other, so the one that reports no progress first need not be the one that hangs: who may be."""
    stopped = [rank for rank in ranks if rank.is_stopped()]
    if stopped:
        return f"; stopped: {stopped[0].place or f'rank {stopped[0].rank}'}"
    places = [place for rank in ranks if (place := rank.place)]
    behind = min(places, key=lambda place: (place.step, place.since), default=None)
    return f"; the furthest behind: {behind}" if behind else ""


def _report(failures: Sequence[tuple[_Rank, FatalError]], suspect: str) -> int:
    """Say in one message which rank failed first and why; the exit code of the whole run."""
    if not failures:
        return 0
    rank, failure = min(failures, key=lambda item: _lateness(*item))
    if rank.rank == 0 and failure.text:
        with contextlib.suppress(OSError), rank.log.open("a", encoding="utf-8") as log:
            log.write(failure.text.rstrip() + "\n")
    if failure.exit_code == 2:
        if failure.text:
            print(failure.text, file=sys.stderr, flush=True)
        return 2
    lines = failure.text.strip().splitlines() or [""]
    if rank.rank == 0 and len(lines) > 1:
        print(failure.text.rstrip(), file=sys.stderr, flush=True)
    reason = f" ({lines[-1].removeprefix('sdp: error: ')}{suspect})" if lines[-1] else ""
    _say(f"error: {described_end(rank.rank, failure.exit_code, rank.place)}{reason}; its log: {rank.log}")
    return 1


def _lateness(rank: _Rank, failure: FatalError) -> tuple[bool, bool, float, int]:
    """Sorts causes before consequences.

    A rank killed from outside cannot be a consequence; SIGABRT can: it is how communication libraries end a process
    whose peer is gone. A user's mistake is no consequence either. Among the rest the first report counts.
    """
    killed = failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT
    return not killed, failure.exit_code != 2, failure.time, rank.rank


def own_command() -> list[str]:
    """What runs the command line that runs here."""
    # -P: a folder "sdp" in the working directory must not take the place of the package that runs here.
    return [sys.executable, "-P", "-m", PACKAGE]


def search_path() -> dict[str, str]:
    """Settings under which a child imports the very package that runs here.

    An installed package, editable or not, is found without help. One found on the parent's search path is found by a
    child if the folder that holds it is on PYTHONPATH; site-packages must not be put there, it would go before the
    standard library.
    """
    package = Path(__file__).absolute().parent.parent
    root = __name__.partition(".")[0]
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package.name != root or str(package.parent) in installed:
        return {}
    return search_path_settings(package.parent)


def _tune_allocator() -> None:
    """The allocator settings for a process that is already running, by glibc's ``mallopt``; elsewhere nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        resolved = child_environment({}, allocator_settings())
        for name, parameter in _MALLOPT.items():
            if resolved[name].isdecimal():
                mallopt(parameter, int(resolved[name]))


def _say(text: str) -> None:
    print(f"sdp: {text}", file=sys.stderr, flush=True)
