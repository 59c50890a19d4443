"""Environment variables for the processes of a run, messages during a long wait, and a clean exit.

A process that used gloo can crash when it exits, although its work is done. The reason is that
gloo's threads may still release tensors and ask for the GIL, which aborts an interpreter that is
shutting down (github.com/pytorch/pytorch/issues/190489, /pull/179291). So the command line exits
without shutting the interpreter down. A user's script gives the threads time to finish first.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def variables_with(prefixes: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables whose names begin with one of ``prefixes``."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(tuple(prefixes))}


def child_environment(overlay: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a process that this process starts.

    Args:
        overlay: variables that replace those of this process.
        defaults: variables that are added if this process does not have them.
    """
    return {**defaults, **os.environ, **overlay}


def service_token() -> str | None:
    """Return the secret with which groups and their anchor service identify each other, or None."""
    return os.environ.get("SDP_SERVICE_TOKEN")


def cache_folder() -> Path:
    """Return the folder for local copies of files in object stores: SDP_CACHE, or ~/.cache/sdp."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("SDP_CACHE") or f"{caches}/sdp").expanduser().absolute()


def allocator_settings() -> dict[str, str]:
    """Return variables of glibc with which freed blocks of 64 KiB or more go back to the system.

    Then the resident memory of a process on a CPU is close to the size of its live tensors.
    """
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def loopback_settings() -> dict[str, str]:
    """Return variables with which gloo and NCCL listen on the loopback interface only.

    A run on one host should set them, because both libraries accept every connection.
    """
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def thread_settings(processes: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable OMP_NUM_THREADS for one of ``processes`` that share this host's cores.

    The result is empty if the user has set the variable.
    """
    environ = os.environ if environ is None else environ
    if environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}


def search_path_settings(directory: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable PYTHONPATH with ``directory`` added in front.

    The result is empty if the variable has the directory already.
    """
    current = (os.environ if environ is None else environ).get("PYTHONPATH", "")
    parts = [part for part in current.split(os.pathsep) if part]
    if any(Path(part).absolute() == directory for part in parts):
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(directory), *parts])}


def usable_cores() -> int:
    """Return the number of cores that this process may use, which a job may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The threads need microseconds once they have a core.
SECONDS = 0.25

_watched = False


def watch() -> None:
    """Make this process wait for gloo's threads before the interpreter shuts down. Idempotent."""
    global _watched
    if not _watched:
        _watched = True
        atexit.register(wait_for_threads)


def leaves_at_once() -> None:
    """Say that this process skips the interpreter shutdown. A later :func:`watch` does nothing."""
    global _watched
    _watched = True


def wait_for_threads() -> None:
    """Give gloo's threads time to release their tensors."""
    gc.collect()  # otherwise tensors in reference cycles would be released later
    time.sleep(SECONDS)  # sleeping releases the GIL


SILENT_SECONDS = 20.0
log = logging.getLogger("sdp")


@contextmanager
def announced(reason: Callable[[], str | None]) -> Iterator[None]:
    """A context for work that may wait for long. After 20 seconds, a log line says why.

    ``reason`` is called then, and returns the line. If it returns None, nothing is logged.
    """

    def announce() -> None:
        if (line := reason()) is not None:
            log.warning("%s", line)

    timer = threading.Timer(SILENT_SECONDS, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compiler_locks() -> str | None:
    """Return a line that names lock files of ``torch.utils.cpp_extension``, or None if none exist.

    If a process is killed while it compiles, its lock file stays, and later processes wait forever.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    ages = {lock: time.time() - lock.stat().st_mtime for lock in root.glob("**/lock")}
    if not ages:
        return None
    locks = ", ".join(f"{lock} ({seconds / 60:.0f} minutes old)" for lock, seconds in ages.items())
    return f"waiting until a C++ extension is compiled: {locks}; if no process compiles it, remove this lock file"
