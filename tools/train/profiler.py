"""``sdp train --profile``: what rank 0 did in a few steps, as a trace and, on CUDA, a history of its memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ...engine.errors import ConfigError

log = logging.getLogger("sdp")

MEMORY_EVENTS = 1_000_000  # the newest; about 100 bytes each without stacks, 1 KB with them


def parse_steps(text: str) -> tuple[int, int]:
    """``FIRST-LAST`` or ``STEP``, counted from 1. Raises :class:`ConfigError`."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(
            f"--profile {text}: steps are given as FIRST-LAST, 3-5 for example; where CONFIG follows, put it before --profile"
        )
    return int(first), int(last)


class StepProfiler:
    """Records steps ``first`` to ``last``, counted from where this start of the run begins, and writes them to ``directory``."""

    def __init__(self, first: int, last: int, directory: Path, device: torch.device):
        self._last, self._done, self._recording = last, 0, False
        self._trace, self._memory = directory / "rank-0-trace.json.gz", directory / "rank-0-memory.pickle"
        self._cuda = device.type == "cuda"
        self._steps = f"step {first}" if first == last else f"steps {first} to {last}"
        directory.mkdir(parents=True, exist_ok=True)
        # A step of warm-up: the profiler's own start is slow.
        warmup = min(1, first - 1)
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])],
            schedule=schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1),
            record_shapes=True,
            profile_memory=True,
            acc_events=True,
        )

    def start(self) -> None:
        """To be called before the first step."""
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile.start()
        self._recording = True

    def step(self) -> None:
        """A step is over; after the last one to be recorded the files are written."""
        self._done += 1
        self._profile.step()
        if self._done == self._last:
            self._write()

    def _write(self) -> None:
        self._profile.stop()
        self._recording = False
        self._profile.export_chrome_trace(str(self._trace))
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(self._memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        memory = f"{self._memory} (pytorch.org/memory_viz)" if self._cuda else "no memory snapshot on a CPU"
        log.info("profile of %s: %s (ui.perfetto.dev); %s", self._steps, self._trace, memory)

    def close(self) -> None:
        """Stop recording where the run ended early."""
        if self._recording:
            self._profile.stop()
            log.warning(
                "WARNING: no profile was written: the run ended %d step(s) after its start, before the end of %s",
                self._done,
                self._steps,
            )
