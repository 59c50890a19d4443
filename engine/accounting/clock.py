"""The clock that times the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device, *, waits: bool) -> Callable[[], float]:
    """Return a function that gives the time in seconds, as ``time.perf_counter`` does.

    On CUDA, if ``waits`` is true, the function first waits until the work queued so far is done. It
    waits for the current stream alone, so that communication on other streams still overlaps.
    """
    if device.type != "cuda" or not waits:
        return time.perf_counter

    def seconds() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return seconds
