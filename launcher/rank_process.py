"""Starts one rank as a process of this host, and reads its state and the cause of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.distributed.heartbeat import RankPosition
from ..engine.environment.detect import ERROR_FILE, PARENT_PID, POSITION_FILE
from ..engine.environment.process import search_path_settings
from ..engine.errors import LaunchError
from ..engine.files import open_own_file, refuse_link
from .fatal_errors import FatalError

PACKAGE = __name__.partition(".")[0]  # ``sdp``
_LAST_LOG_BYTES = 4096


@dataclass
class RankProcess:
    """A rank that runs as a child process of the launcher.

    Earlier runs wrote to the same log, so ``log_start`` says at which byte this run begins.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    error_file: Path
    position_file: Path

    @classmethod
    def start(
        cls,
        rank: int,
        command: Sequence[str],
        environ: dict[str, str],
        log_dir: Path,
        pass_fds: Sequence[int] = (),
        name: str | None = None,
    ) -> RankProcess:
        """Start a rank as a child process, and return it.

        Args:
            rank: the number of the rank. Rank 0 writes to the terminal, and other ranks to a log.
            command: the words to run.
            environ: the environment of the process.
            log_dir: the directory of the log. It is made if it is missing.
            pass_fds: open files that the process inherits.
            name: the name of the log without ``.log``. If None, ``rank-R``.

        Raises:
            LaunchError: the process cannot be started, or its log cannot be written.
            WriteError: the log or its directory is a symbolic link.
        """
        name = name or f"rank-{rank}"
        log, error_file = log_dir / f"{name}.log", log_dir / f"{name}.{os.getpid()}.error"
        position_file = error_file.with_suffix(".position")
        environ |= {PARENT_PID: str(os.getpid())}
        environ |= {ERROR_FILE: str(error_file.absolute()), POSITION_FILE: str(position_file.absolute())}
        try:
            refuse_link(log_dir)
            log_dir.mkdir(parents=True, exist_ok=True)
            error_file.unlink(missing_ok=True)
            position_file.unlink(missing_ok=True)
            with os.fdopen(open_own_file(log), "ab") as output:
                process = subprocess.Popen(
                    command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else output,
                    stderr=None if rank == 0 else subprocess.STDOUT,
                    process_group=0,  # Ctrl-C reaches the launcher only, which forwards it once
                    pass_fds=pass_fds,
                )
                return cls(rank, process, log, output.tell(), error_file, position_file)
        except OSError as error:
            raise LaunchError(f"rank {rank} cannot be started with its log in {log_dir}: {error}") from None

    def has_ended(self) -> bool:
        """Whether the process has ended. If so, this also kills the rest of its process group."""
        if self.process.returncode is None and _has_exited(self.process):
            self.kill()  # before the process is reaped: after that its group id may belong to another
            self.process.wait()
        return self.process.returncode is not None

    def failure(self) -> FatalError | None:
        """Return why the process failed, or None if it succeeded or runs without an error.

        A process that has reported an error counts as failed, even if it still runs.
        """
        code = self.process.returncode
        if code == 0:
            return None
        report = self.report()
        if report is not None or code is None:
            return report
        return FatalError(code, self._last_log_line(), time.time())

    def report(self) -> FatalError | None:
        """The error that the process reported, or None."""
        return FatalError.read(self.error_file)

    @property
    def position(self) -> RankPosition | None:
        """The step and the activity that the rank reported last, or None."""
        return RankPosition.read(self.position_file)

    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger has stopped the process."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def send_signal(self, number: int) -> None:
        """Send the process a signal, and continue a stopped process so that it can react."""
        self.process.send_signal(number)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and everything in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Remove the files in which the process reported its error and its position."""
        for path in (self.error_file, self.position_file):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _last_log_line(self) -> str:
        """The last line that a rank above 0 logged in this run. Rank 0 logs to the terminal."""
        if self.rank == 0:
            return ""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_start, size - _LAST_LOG_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:  # the directory was removed
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def own_command() -> list[str]:
    """Return the words that run the command ``sdp`` of this package in another process."""
    # -P: a folder "sdp" in the working directory must not be imported in place of this package.
    return [sys.executable, "-P", "-m", PACKAGE]


def search_path() -> dict[str, str]:
    """Return the environment variables with which a child process imports the same package as this
    one.

    An installed package, editable or not, needs no variables. Otherwise PYTHONPATH gets the folder
    above the package. This folder must not be site-packages, because PYTHONPATH comes before the
    standard library.
    """
    package = Path(__file__).absolute().parent.parent
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package.name != PACKAGE or str(package.parent) in installed:
        return {}
    return search_path_settings(package.parent)
