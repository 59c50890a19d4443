"""Whether a process is active, which tells a hang from work that takes long. Linux only."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_GAP_SECONDS = 1.0  # after which nobody knows what the process did meanwhile
_LEAST_SHARE = 0.02  # of one core; each of gloo's threads uses 0.001 of one while it waits
_LEAST_BYTES = 1 << 14  # sent in a second; a rank that waits sends less than a kilobyte
_ACTIVE = "RD"  # runs or wants to, waits for a disk or for memory
_TICKS = os.sysconf("SC_CLK_TCK")

# The numbers of system calls that wait for another thread, another process or a network, but not
# for a file system, as the headers asm/unistd_64.h and asm-generic/unistd.h of Linux give them:
# futex, futex_waitv, futex_wait, poll, ppoll, select, pselect6, epoll_wait, epoll_pwait,
# epoll_pwait2, nanosleep, clock_nanosleep, recvfrom, recvmsg, recvmmsg, sendto, sendmsg, sendmmsg,
# accept, accept4, connect, wait4, waitid, rt_sigtimedwait, rt_sigsuspend, pause, restart_syscall,
# and ioctl, in which drivers of devices wait.
_X86_WAITS = {
    202, 449, 455, 7, 271, 23, 270, 232, 281, 441, 35, 230, 45, 47, 299, 44, 46, 307, 43, 288, 42, 61, 247, 128, 130,
    34, 219, 16,
}  # fmt: skip
_GENERIC_WAITS = {
    98, 449, 455, 73, 72, 22, 441, 101, 115, 207, 212, 243, 206, 211, 269, 202, 242, 203, 260, 95, 137, 133, 128, 29,
}  # fmt: skip
# For each machine: the waits, and read and readv, which may wait for a message or a file. To write
# is no wait: gloo's sockets do not block, and a terminal or a pipe waits for another program.
_CALLS = {"x86_64": (_X86_WAITS, {0, 19}), "aarch64": (_GENERIC_WAITS, {63, 65}), "riscv64": (_GENERIC_WAITS, {63, 65})}
_UNKNOWN = (set[int](), set[int]())


class ProcessActivity:
    """Looks at this process and at those that it started, such as compilers.

    Call both methods often, always from the same thread, which does not count.

    Args:
        look_seconds: the time between two looks at all threads and children.
    """

    def __init__(self, look_seconds: float = 1.0):
        self._look_seconds = look_seconds
        self._main = Path(f"/proc/self/task/{os.getpid()}")
        self._last = self._looked = self._counted = -float("inf")
        self._active = self._file = -float("inf")  # when it was last active, and last used a file
        self._used: dict[Path, float] = {}  # CPU seconds of each thread and child at the last look
        self._sent, self._sends = 0, False
        self._waits = 0  # how often the main thread has begun to wait

    def quiet_seconds(self) -> tuple[float, float]:
        """Return for how many seconds this process was idle, and for how many it used no file.

        If the system does not tell, the first is 0 and the second grows. The process is not idle if

        - the main thread or a child runs or wants to run,
        - a thread or a child waits for a disk, or uses more than 2 % of a core,
        - it sends a lot: over a slow link, this takes little CPU time,
        - a thread is in a system call for a file, as on a network file system,
        - the main thread wakes up at least once in a second, as it does if it looks again and
          again for a file or a lock.
        """
        now = time.monotonic()
        is_active, uses_file = (True, True) if now - self._last > _GAP_SECONDS else self._look(now)
        self._last = now
        self._active, self._file = now if is_active else self._active, now if uses_file else self._file
        return now - self._active, now - self._file

    def is_sending(self) -> bool:
        """Return whether this process sent or wrote much in the last second."""
        now = time.monotonic()
        if (elapsed := now - self._counted) >= 1:
            before, self._sent, self._counted = self._sent, _written_bytes(), now
            self._sends = self._sent - before > _LEAST_BYTES * elapsed
        return self._sends

    def _look(self, now: float) -> tuple[bool, bool]:
        """Return whether the process is active, and whether it uses a file."""
        main = _state_and_seconds(self._main)
        if main is None or not all((self._main / name).exists() for name in ("children", "syscall")):
            return True, False
        uses_file = _uses_file(self._main, main[0])
        is_active = uses_file or main[0] in _ACTIVE
        if (elapsed := now - self._looked) < self._look_seconds:
            return is_active, uses_file
        waits, self._waits = self._waits, _count_waits(self._main)
        before, ended = self._used, os.times()
        self._looked, self._used = now, {Path("ended"): ended.children_user + ended.children_system}
        for each in _numbers_in(self._main.parent):
            if each.name != str(threading.get_native_id()) and (found := _state_and_seconds(each)) is not None:
                uses_file |= _uses_file(each, found[0])
                self._used[each] = found[1]
        for each in _descendants(self._main.parent):
            if (found := _state_and_seconds(each)) is not None:
                is_active |= found[0] in _ACTIVE
                self._used[each] = found[1]
        least = max(2 / _TICKS, _LEAST_SHARE * elapsed)
        is_active |= self.is_sending() or any(
            seconds - before.get(each, 0.0) > least for each, seconds in self._used.items()
        )
        return is_active or uses_file or waits != self._waits, uses_file


def _state_and_seconds(process: Path) -> tuple[str, float] | None:
    """Return the state and the CPU time of a process or thread, None if it is gone."""
    try:
        fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return None


def _uses_file(thread: Path, state: str) -> bool:
    """Return whether a thread of this process waits for something that may be a file.

    False if it runs or is gone, and True if the system does not tell.
    """
    if state == "D":
        return True
    waits, reads = _CALLS.get(platform.machine(), _UNKNOWN)
    try:
        number, *arguments = (thread / "syscall").read_text().split()
        if number == "running":
            return False
        if int(number) not in reads:  # -1: it waits for a page of its memory, or has ended
            return int(number) not in waits and state != "Z"
        # Only the name is read. To look at the file itself could hang as this call does.
        name = str((thread / "fd" / str(int(arguments[0], 16))).readlink())
    except PermissionError:
        return True
    except (OSError, IndexError, ValueError):
        return False
    return not name.startswith(("socket:", "anon_inode:", "pipe:", "/dev/"))


def _count_waits(thread: Path) -> int:
    """Return how often a thread has begun to wait. 0 if unknown."""
    try:
        lines = (thread / "status").read_text(errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return 0


def _numbers_in(folder: Path) -> list[Path]:
    """Return the threads or processes below a folder of /proc, none if it is gone."""
    try:  # Path.glob would fail if the folder vanished while it looks
        return [each for each in folder.iterdir() if each.name.isdecimal()]
    except OSError:
        return []


def _descendants(tasks: Path) -> Iterator[Path]:
    """Yield the children of a process, their children, and so on. ``tasks``: its threads."""
    for task in _numbers_in(tasks):
        try:
            numbers = (task / "children").read_text().split()
        except OSError:
            continue
        for number in numbers:
            child = Path("/proc") / number
            yield child
            yield from _descendants(child / "task")


def _written_bytes() -> int:
    """Return what this process has written so far, as gloo writes to its sockets. 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))
    except (OSError, ValueError, StopIteration):
        return 0
