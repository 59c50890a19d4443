"""A pool of rank processes that lives as long as the test session: starting them and importing torch dominates otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=90)
GRACE_SECONDS = 4.0  # for the other ranks, once one has failed
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankError(AssertionError):
    """A function failed, or did not come to an end, on one or more ranks."""


class RankPool:
    """``run(function, …, world=W)`` calls a function on ranks 0 … W − 1, each in a process of its own with a fresh gloo group."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, world: int, timeout: float = 120.0) -> list[Any]:
        """What ``function(*args)`` returned, by rank.

        ``function`` is module-level; its module is loaded from its file. Raises :class:`RankError` with the traceback of
        every rank that failed; ranks that are then stuck, or all after ``timeout`` seconds, are killed and later replaced.
        """
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                job = (inspect.getfile(function), function.__module__, function.__qualname__, args, rank, world, f"{folder}/store")
                self._connections[rank].send_bytes(pickle.dumps(job))
            try:
                answers = self._collect(world, time.monotonic() + timeout)
            except BaseException:  # Ctrl-C too: no rank may stay behind in a collective
                self.close()
                raise
        stuck = [rank for rank in range(world) if rank not in answers]
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if stuck:
            for rank in stuck:  # they print where they are (faulthandler)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)
            self.close()
        if stuck or failed:
            reasons = [
                f"ranks {[r for r in failed if failed[r] == text]} of {world} failed:\n{text}" for text in dict.fromkeys(failed.values())
            ]
            if stuck:
                reasons.append(
                    f"ranks {stuck} of {world} did not finish {'after that' if failed else f'in {timeout:.0f} s'}; the pool starts anew"
                )
            raise RankError("\n".join(reasons))
        return [answers[rank][1] for rank in range(world)]

    def _collect(self, world: int, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        open_ranks = {id(self._connections[rank]): rank for rank in range(world)}
        while len(answers) < world and (left := deadline - time.monotonic()) > 0:
            waiting = [self._connections[rank] for rank in open_ranks.values() if rank not in answers]
            for connection in wait_for(waiting, timeout=left):
                rank = open_ranks[id(connection)]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = (False, f"the process died (exit code {self._processes[rank].exitcode})")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if any("the process died" in str(text) for fine, text in answers.values() if not fine):
            self.close()
        return answers

    def _start(self, world: int) -> None:
        if any(not process.is_alive() for process in self._processes):
            self.close()
        for rank in range(len(self._processes), world):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, os.getpid()), name=f"rank-{rank}", daemon=True)
            with _environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def close(self) -> None:
        """Kill the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _serve(connection: Connection, parent: int) -> None:
    """A rank's life: jobs come as bytes, answers go back as bytes, until the other end closes."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: die with the test session, however it ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's, which kills its ranks
    faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = pickle.dumps((True, _run(*job)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        gc.collect()
        connection.send_bytes(answer)


def _load(file: str, name: str) -> Any:
    """The module ``name`` from its file: test modules are on no import path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _run(file: str, module: str, name: str, args: tuple[Any, ...], rank: int, world: int, store: str) -> Any:
    import torch.distributed as dist

    here = dict(zip(_VARIABLES, map(str, (rank, world, rank, world, 0, "127.0.0.1", 29999)), strict=True))
    with _environment(here):
        files = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
        try:
            return getattr(_load(file, module), name)(*args)
        finally:
            dist.destroy_process_group()
