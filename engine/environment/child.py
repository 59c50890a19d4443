"""The environment variables that a launcher gives to the processes it starts.

They set the number of threads, the allocator and Python's search path.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def search_program(name: str) -> str | None:
    """Return the path of program ``name``, or None if it is not on the PATH."""
    return shutil.which(name)


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


def allocator_settings() -> dict[str, str]:
    """Return glibc settings that make a process's resident memory follow its live tensors on a CPU.

    Freed blocks of 64 KiB and more go back to the system at once, and threads share one arena. With
    128 MiB of live tensors, 32 MiB of weights then raise resident memory by 153 MB instead of
    228 MB.
    """
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def loopback_settings() -> dict[str, str]:
    """Return variables with which gloo and NCCL listen on the loopback interface only.

    They are for a run on one host. Neither library asks who connects.
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
