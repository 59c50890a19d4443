"""Runs the service of ``sdp serve`` and its groups on this host, and restarts what fails."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from ..engine.config.schema import Config
from ..engine.environment.detect import LOOPBACK, free_port
from ..engine.environment.process import allocator_settings, child_environment, loopback_settings, thread_settings
from .fatal_errors import say, show
from .local import wait
from .rank_process import RankProcess, own_command, search_path
from .signals import caught_signals

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0  # from a signal until processes are killed


class _Process:
    """The service (number 0) or a group, which is started again ``restarts`` times in an hour."""

    def __init__(self, number: int, words: Sequence[str], environ: dict[str, str], log_dir: Path, restarts: int):
        self.name, log = (f"group process {number}", f"group-{number}") if number else ("the service", "service")
        self._start = lambda: RankProcess.start(number, [*own_command(), *words], dict(environ), log_dir, name=log)
        self._number, self._most, self._ends = number, restarts, list[float]()
        self.rank, self.code = self._start(), None  # an exit code, once the process is not started again

    def look(self) -> None:
        if self.code is not None or not self.rank.has_ended():
            return
        failure, ends = self.rank.failure(), [end for end in self._ends if time.monotonic() - end < 3600]
        code = failure.exit_code if failure is not None else 0
        says_why = failure is not None and self._number == 0 and failure.is_known
        if code in (0, 2) or says_why or len(ends) >= self._most:
            self.code = code
            if failure is not None:
                show(failure.text.rstrip() or f"sdp: error: {self.name} ended with exit code {code}")
                say(f"{self.name} is not started again; its log: {self.rank.log}")
            return
        self._ends = [*ends, time.monotonic()]
        say(f"{self.name} ended with exit code {code}: restart {len(self._ends)} of {self._most} in this hour")
        self.rank.forget()
        self.rank = self._start()


def start_served(config: Config, words: Sequence[str], dump_dir: Path, processes: int, *, on_cpu: bool) -> int:
    """Run a service and its groups on this host, and return the exit code.

    The service writes to this process's terminal, and groups to ``dump_dir/logs`` and ``groups``.
    ``words`` are the file and ``--set`` options. ``processes`` is the number of ranks of a group.
    """
    assert config.sdp.sync is not None and config.sdp.sync.service is not None
    groups, restarts = config.sdp.groups, config.sdp.sync.service.restarts
    makes_corpus = config.data.takes_default_corpus and config.data.name is None
    port, log_dir = free_port(), dump_dir / "logs"
    settings = {**search_path(), **thread_settings(groups * processes), "SDP_SERVICE_TOKEN": secrets.token_hex(32)}
    environ = child_environment(settings, loopback_settings() | (allocator_settings() if on_cpu else {}))
    serve = ["serve", *words, "--bind", f"{LOOPBACK}:{port}", "--dump-dir", str(dump_dir)]
    data = ["--set", f"data.path={json.dumps(str((dump_dir / 'corpus').absolute()))}"] if makes_corpus else []
    train = ["train", *words, *data, "--service", f"{LOOPBACK}:{port}", "--nproc", str(processes), "--dump-dir"]
    started, code = list[_Process](), None
    with caught_signals() as received:
        try:
            started.append(service := _Process(0, serve, environ, log_dir, restarts))
            while not received and code is None:
                time.sleep(_POLL_SECONDS)
                for process in started:
                    process.look()
                if len(started) == 1 and _listens(port):  # the service has prepared the data
                    for group in range(1, groups + 1):
                        directory = str(dump_dir / "groups" / str(group))
                        started.append(_Process(group, [*train, directory], environ, log_dir, restarts))
                failed, code = [process.code for process in started[1:] if process.code], service.code
                if code is None and (2 in failed or len(failed) == groups):
                    code = 2 if 2 in failed else 1
            if received:
                say(f"{signal.Signals(received[0]).name} received, ending {len(started)} processes")
            known, running = len(received), [process.rank for process in started if not process.rank.has_ended()]
            for rank in running if code or received else ():
                rank.send_signal(received[0] if received else signal.SIGTERM)
            wait(running, lambda: len(received) > known, _STOP_SECONDS)
            return 128 + received[0] if received else code or 0
        finally:  # kills the processes that have not ended in time
            for process in started:
                process.rank.kill()
                process.rank.forget()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
