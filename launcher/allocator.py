"""glibc's allocator settings for a process that is already running."""

from __future__ import annotations

import ctypes

from ..engine.environment.child import allocator_settings, child_environment

# The parameter numbers of mallopt, from glibc's <malloc.h>.
_PARAMETERS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_ARENA_MAX": -8}


def tune_allocator() -> None:
    """Give this process the allocator settings that started ranks get as variables.

    A no-op without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        resolved = child_environment({}, allocator_settings())
        for name, parameter in _PARAMETERS.items():
            if resolved[name].isdecimal():
                mallopt(parameter, int(resolved[name]))
