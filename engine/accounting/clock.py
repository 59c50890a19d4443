"""What the parts of a step are timed with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device, *, waits: bool) -> Callable[[], float]:
    """Seconds, as ``time.perf_counter``; on CUDA, if it ``waits``, once the work that was queued before has been done.

    It waits for the current stream alone, so that communication which runs beside it stays beside it.
    """
    if device.type != "cuda" or not waits:
        return time.perf_counter

    def seconds() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return seconds
