"""Start a service and the groups of its run on this host, and start again what dies."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ..engine.environment.detect import LOOPBACK, free_port
from ..engine.environment.process import allocator_settings, child_environment, loopback_settings, thread_settings
from .fatal_errors import say, show
from .own_command import own_command, search_path
from .rank_process import RankProcess
from .signals import caught_signals

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0  # from a signal until processes are killed
_HOUR = 3600.0


class _Process:
    """A process of the run that is started again.

    Args:
        number: 0 for the service, and 1 … for the groups.
        words: what follows ``sdp``.
        environ: its environment.
        log_dir: the directory of its log.
        restarts: how often in an hour it is started again.
    """

    def __init__(self, number: int, words: Sequence[str], environ: dict[str, str], log_dir: Path, restarts: int):
        self.name = "the service" if number == 0 else f"group process {number}"
        self._number, self._words, self._environ, self._log_dir = number, words, environ, log_dir
        self._left, self._ends = restarts, deque[float]()
        self.is_over = False
        self.rank = self._start()

    def _start(self) -> RankProcess:
        command, name = [*own_command(), *self._words], "service" if self._number == 0 else f"group-{self._number}"
        return RankProcess.start(self._number, command, dict(self._environ), self._log_dir, name=name)

    def look(self) -> int | None:
        """Start the process again if it has died. Returns its exit code if it is over now."""
        if self.is_over or not self.rank.has_ended():
            return None
        failure = self.rank.failure()
        code = failure.exit_code if failure is not None else 0
        now = time.monotonic()
        while self._ends and now - self._ends[0] > _HOUR:
            self._ends.popleft()
        known = failure is not None and self._number == 0 and failure.is_known
        if code in (0, 2) or known or len(self._ends) >= self._left:
            self.is_over = True
            if failure is not None:
                show(failure.text.rstrip() or f"sdp: error: {self.name} ended with exit code {code}")
                say(f"{self.name} is not started again; its log: {self.rank.log}")
            return code
        self._ends.append(now)
        say(f"{self.name} ended with exit code {code}: restart {len(self._ends)} of {self._left} in this hour")
        self.rank.forget()
        self.rank = self._start()
        return None


def start_served(
    words: Sequence[str],
    dump_dir: Path,
    groups: int,
    processes: int,
    *,
    on_cpu: bool,
    makes_corpus: bool,
    restarts: int,
) -> int:
    """Run a service and its groups on this host, and return the exit code of the whole.

    The service keeps this process's terminal. The groups' output is in ``dump_dir/logs``, and their
    files are in ``dump_dir/groups``.

    Args:
        words: the configuration and its overrides.
        dump_dir: the directory of the run.
        groups: the number of groups.
        processes: the ranks of a group.
        on_cpu: give the ranks glibc's allocator settings for a CPU.
        makes_corpus: whether the service prepares the corpus in ``dump_dir/corpus``.
        restarts: how often in an hour the service, or a group, is started again.
    """
    address, log_dir = f"{LOOPBACK}:{free_port()}", dump_dir / "logs"
    defaults = loopback_settings() | (allocator_settings() if on_cpu else {})
    settings = {**search_path(), **thread_settings(groups * processes), "SDP_SERVICE_TOKEN": secrets.token_hex(32)}
    environ = child_environment(settings, defaults)
    serve = ["serve", *words, "--bind", address, "--dump-dir", str(dump_dir), "--expect", str(groups)]
    started: list[_Process] = []
    with caught_signals() as received:
        try:
            service = _Process(0, serve, environ, log_dir, restarts)
            started.append(service)
            if not _await_service(service, address, received):
                return _end(started, received, service.rank.process.returncode or 1)
            data = ["--set", f"data.path={json.dumps(str((dump_dir / 'corpus').absolute()))}"] if makes_corpus else []
            for group in range(1, groups + 1):
                train = ["train", *words, *data, "--service", address, "--nproc", str(processes)]
                train += ["--dump-dir", str(dump_dir / "groups" / str(group))]
                started.append(_Process(group, train, environ, log_dir, restarts))
            while not received:
                codes = [process.look() for process in started]
                if service.is_over:
                    return _end(started, received, codes[0] or 0)
                if 2 in codes or (all(process.is_over for process in started[1:]) and any(codes)):
                    return _end(started, received, 2 if 2 in codes else 1)
                time.sleep(_POLL_SECONDS)
            say(f"{signal.Signals(received[0]).name} received, ending {len(started)} processes")
            return _end(started, received, 128 + received[0])
        finally:
            for process in started:
                process.rank.kill()
                process.rank.forget()


def _await_service(service: _Process, address: str, received: Sequence[int]) -> bool:
    """Wait until the service answers, after it has prepared the data. Returns whether it does."""
    host, _, port = address.rpartition(":")
    while not received:
        if service.look() is not None:
            return False
        try:
            socket.create_connection((host, int(port)), 1.0).close()
            return True
        except OSError:
            time.sleep(_POLL_SECONDS)
    return False


def _end(started: Sequence[_Process], received: Sequence[int], code: int) -> int:
    """Let all processes end, and kill those that do not. Returns the exit code."""
    waits_until, number = time.monotonic() + _STOP_SECONDS, received[0] if received else signal.SIGTERM
    if code:
        for process in started:
            if not process.rank.has_ended():
                process.rank.send_signal(number)
    known = len(received)
    while time.monotonic() < waits_until and len(received) == known:
        if all(process.rank.has_ended() for process in started):
            break
        time.sleep(_POLL_SECONDS)
    return 128 + received[0] if received else code
