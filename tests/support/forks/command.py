"""``sdp``, and scripts, in processes that are forked from a server that has imported torch.

The imports of a rank take 2.4 processor seconds, a small run 0.2. A forked command and its ranks
are processes of their own, with their own environment, files, signals and exit codes. What they
lack is the start of an interpreter. Tests of that start use :mod:`subprocess` instead.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import multiprocessing
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction, resource_tracker
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import torch
from sdp.launcher import rank_process
from sdp.tools.cli import entry

from .server import fork_context

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
# The parameter numbers of mallopt, from glibc's <malloc.h>.
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_ARENA_MAX": -8}
_MOST_BYTES = 1 << 20  # of the request for a rank: its words and its environment
_LONGEST_START = 120.0  # seconds, of a rank on a loaded machine
_HIGH = 200  # files of a request are moved to descriptors from here on, so that none is in the way


class ForkedCommand:
    """``sdp WORDS``, with the part of :class:`subprocess.Popen` that tests need.

    Args:
        words: what follows ``sdp``.
        stdout: an open file for the output.
        stderr: an open file for messages.
        environment: variables in addition to those of this process.
        prepare: called in the new process first, so that it changes the command and its ranks.
    """

    def __init__(
        self,
        words: Sequence[object],
        stdout: Any,
        stderr: Any,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        prepare: Callable[[], object] | None = None,
    ):
        self.args = ["sdp", *map(str, words)]
        files = [_OpenFile(file.fileno()) for file in (stdout, stderr)]
        arguments = (self.args, dict(os.environ) | dict(environment), str(Path.cwd()), *files, prepare)
        self._process = fork_context().Process(target=_run_command, args=arguments, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that killed the process, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(*words: object, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = ForkedCommand(words, output, errors)
        try:
            code = command.wait(timeout)
        finally:
            command.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command.args, code, output.read(), errors.read())


class ForkedScript:
    """A script that has torch already, with the part of :class:`subprocess.Popen` that tests need.

    Its end is that of an interpreter: an error prints its traceback, threads are awaited, and the
    handlers that the script registered are called.

    Args:
        path: the script's file.
        *words: its arguments.
        environment: variables in addition to those of this process.
    """

    def __init__(self, path: Path, *words: object, environment: Mapping[str, object] = MappingProxyType({})):
        self._output = os.memfd_create("output")
        variables = dict(os.environ) | {name: str(value) for name, value in environment.items()}
        arguments = ([str(path), *map(str, words)], variables, str(Path.cwd()), _OpenFile(self._output))
        self._process = fork_context().Process(target=_run_script, args=arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> str:
        """Return what the script printed until now, on either stream."""
        return os.pread(self._output, os.fstat(self._output).st_size, 0).decode()

    def end(self, timeout: float = 120.0) -> tuple[int, str]:
        """Wait for the script; return its exit code, and what it printed."""
        self._process.join(timeout)
        self._process.kill()
        self._process.join()
        return self._process.exitcode, self.printed()


def _run_script(words: list[str], environ: dict[str, str], folder: str, output: _OpenFile) -> NoReturn:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    _become(words, environ, {0: null, 1: output.descriptor, 2: output.descriptor}, keep=null)
    atexit._clear()  # what the server registered
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


class _OpenFile:
    """A file that is sent to the server's child, where it has another descriptor."""

    def __init__(self, descriptor: int):
        self._duplicate = descriptor

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._duplicate)

    def __setstate__(self, duplicate: Any) -> None:
        self.descriptor: int = duplicate.detach()


def _run_command(
    words: list[str],
    environ: dict[str, str],
    folder: str,
    output: _OpenFile,
    errors: _OpenFile,
    prepare: Callable[[], object] | None,
) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with the test session
    os.chdir(folder)
    if prepare is not None:
        prepare()
    nursery = Nursery()
    null = os.open(os.devnull, os.O_RDONLY)
    _become(words, environ, {0: null, 1: output.descriptor, 2: errors.descriptor}, keep=nursery.use())
    stand_in = SimpleNamespace(Popen=nursery.start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    rank_process.subprocess = stand_in
    entry()  # it raises SystemExit, which multiprocessing turns into the exit code


def _become(words: list[str], environ: Mapping[str, str], files: dict[int, int], keep: int) -> None:
    """Make this process like a new one, which has these words, variables and open files.

    Args:
        words: the command line.
        environ: the environment.
        files: by descriptor of the new process, the open file that it shall be.
        keep: a descriptor that stays open too.
    """
    moved = {number: fcntl.fcntl(handle, fcntl.F_DUPFD, _HIGH) for number, handle in files.items()}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = sorted({*moved.values(), keep, resource_tracker.getfd()})
    for first, last in zip([0, *(handle + 1 for handle in kept)], [*kept, most], strict=True):
        os.closerange(first, last)
    for number, handle in moved.items():
        os.dup2(handle, number, inheritable=True)
        os.close(handle)
    sys.argv = list(words)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    multiprocessing.current_process().daemon = False  # so it may start processes
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    gc.freeze()  # a collection need not look at the imported modules, nor copy their pages
    for name, parameter in _MALLOPT.items():  # glibc reads these variables when a program starts
        if name in environ:
            ctypes.CDLL(None).mallopt(parameter, int(environ[name]))


class Nursery:
    """A process that forks the ranks of one command.

    The command may have threads when it starts a rank, and a process with threads cannot fork
    safely. The nursery is forked before any thread is started. A rank that it forks becomes a child
    of the command, because the command is a "subreaper": it adopts processes whose parent ends.
    """

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._mine, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._mine.settimeout(_LONGEST_START)
        command = os.getpid()
        if os.fork() == 0:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._mine.close()
            _tend(theirs, command)
        theirs.close()

    def use(self) -> int:
        """Return the descriptor that the command must keep open."""
        return self._mine.fileno()

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: Any,
        stderr: Any,
        process_group: int,
        pass_fds: Sequence[int],
    ) -> _ForkedRank:
        """Start a rank, as :class:`subprocess.Popen` would with these arguments."""
        assert list(command[1:4]) == ["-P", "-m", "sdp"] and stdin == subprocess.DEVNULL and process_group == 0
        output = 1 if stdout is None else stdout.fileno()
        files = {1: output, 2: 2 if stderr is None else output, **{handle: handle for handle in pass_fds}}
        request = pickle.dumps((["sdp", *command[4:]], dict(env), list(files), str(Path.cwd())))
        sent = array.array("i", files.values())
        self._mine.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        answer = self._mine.recv(64)
        if not answer:
            raise OSError("the process that forks ranks has ended")
        return _ForkedRank(int(answer))


def _tend(requests: socket.socket, command: int) -> None:
    """Fork a rank for every request, until the command ends."""
    while True:
        request, handles, _, _ = socket.recv_fds(requests, _MOST_BYTES, 64)
        if not request:
            _end()
        words, environ, numbers, folder = pickle.loads(request)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _run_rank(requests, command, words, environ, dict(zip(numbers, handles, strict=True)), folder)
            _end()  # the command adopts the rank
        os.waitpid(between, 0)
        for handle in handles:
            os.close(handle)


def _run_rank(
    answers: socket.socket, command: int, words: list[str], environ: dict[str, str], files: dict[int, int], folder: str
) -> NoReturn:
    """Be a rank, whose parent is the process ``command``."""
    os.setpgid(0, 0)
    os.chdir(folder)
    _prctl(_PR_SET_NAME, f"sdp-rank {environ.get('RANK', '')}".encode())
    while os.getppid() != command:
        time.sleep(0.0005)
    # A descriptor below could be one of the files that the rank gets.
    answer = fcntl.fcntl(answers.fileno(), fcntl.F_DUPFD, _HIGH)
    _become(words, environ, {0: os.open(os.devnull, os.O_RDONLY), **files}, keep=answer)
    with socket.socket(fileno=answer) as pipe:
        pipe.send(str(os.getpid()).encode())
    entry()  # as above


def forked_rank(process: Path) -> int | None:
    """Return the number of a forked rank, which is in its name, or None for others."""
    name = (process / "comm").read_text().split()
    return int(name[1]) if name[:1] == ["sdp-rank"] and len(name) == 2 else None


class _ForkedRank:
    """A child of this process, with the part of :class:`subprocess.Popen` that launchers need."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: None = None) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _end() -> NoReturn:
    """End this process, without what an interpreter does at its end."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
