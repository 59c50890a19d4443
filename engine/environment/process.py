"""The processes of a run: their environment variables, messages during a long wait, and their end.

A process that used gloo can crash at interpreter exit. gloo's worker threads may still be releasing
tensors, which needs the GIL. A thread that asks for the GIL during finalisation aborts the process
("terminate called without an active exception"). This happens although the work is done and written
(github.com/pytorch/pytorch/issues/190489, /pull/179291). The command line knows its exit code, so
it exits without finalising the interpreter. The exit code of a user's script is known only at the
end, so its threads get time to finish.
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
    """Return the variables whose names begin with one of ``prefixes``."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(tuple(prefixes))}


def child_environment(overlay: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process to start.

    It is the environment of this process. ``overlay`` overrides its variables, and ``defaults``
    apply to variables that are not set.
    """
    return {**defaults, **os.environ, **overlay}


def service_token() -> str | None:
    """Return the secret that groups share with the service of their run, or None."""
    return os.environ.get("SDP_SERVICE_TOKEN")


def cache_folder() -> Path:
    """Return the folder for copies of what is in object stores: SDP_CACHE, or ~/.cache/sdp."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("SDP_CACHE") or f"{caches}/sdp").expanduser().absolute()


def allocator_settings() -> dict[str, str]:
    """Return glibc settings that make a process's resident memory follow its live tensors on a CPU.

    Freed blocks of 64 KiB and more go back to the system at once, and threads share one arena. With
    128 MiB of live tensors, 32 MiB of weights then raise resident memory by 153 MB instead of
    228 MB.
    """
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def loopback_settings() -> dict[str, str]:
    """Return variables with which gloo and NCCL listen on the loopback interface only.

    They are for a run on one host, because both libraries accept every connection.
    """
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def thread_settings(processes: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return OMP_NUM_THREADS, which divides this host's usable cores among ``processes``.

    The result is empty if the user has set the variable.
    """
    environ = os.environ if environ is None else environ
    if environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}


def search_path_settings(directory: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return PYTHONPATH with ``directory`` in front.

    The result is empty if the directory is on the path already.
    """
    current = (os.environ if environ is None else environ).get("PYTHONPATH", "")
    parts = [part for part in current.split(os.pathsep) if part]
    if any(Path(part).absolute() == directory for part in parts):
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(directory), *parts])}


def usable_cores() -> int:
    """Return the number of cores that this process may use. A container or job may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The threads need microseconds once they have a core.
SECONDS = 0.25

_watched = False


def watch() -> None:
    """Make this process wait for its threads before its interpreter ends. Idempotent."""
    global _watched
    if not _watched:
        _watched = True
        atexit.register(wait_for_threads)


def leaves_at_once() -> None:
    """Declare that this process exits without shutting the interpreter down."""
    global _watched
    _watched = True


def wait_for_threads() -> None:
    """Release tensors, and let gloo's threads take the GIL."""
    gc.collect()  # otherwise tensors in reference cycles would be released later
    time.sleep(SECONDS)  # sleeping releases the GIL


SILENT_SECONDS = 20.0
log = logging.getLogger("sdp")


@contextmanager
def announced(reason: Callable[[], str | None]) -> Iterator[None]:
    """A context that logs ``reason()`` once, if that is not None after SILENT_SECONDS."""

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
    """Name the locks of ``torch.utils.cpp_extension``, or None if there is none. If a process was
    killed, its lock remains, and later processes wait for the lock without end.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    ages = {lock: time.time() - lock.stat().st_mtime for lock in root.glob("**/lock")}
    if not ages:
        return None
    locks = ", ".join(f"{lock} ({seconds / 60:.0f} minutes old)" for lock, seconds in ages.items())
    return f"a C++ extension is compiled, or waits for its lock: {locks}; if no process compiles it, remove the lock"
