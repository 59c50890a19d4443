"""``sdp train --profile``: traces a few steps of rank 0 and, on CUDA, records its memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ...engine.errors import ConfigError, WriteError, shorten
from ...engine.files import refuse_link
from .observer import Observer

log = logging.getLogger("sdp")

# The newest events are kept. An event takes about 100 bytes, or 1 KB with its stack.
MEMORY_EVENTS = 1_000_000
_MOST_DIGITS = 18  # of a step; Python refuses to read numbers of thousands of digits


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and last step in ``FIRST-LAST`` or ``STEP``. Raises :class:`ConfigError`."""
    first, _, last = text.partition("-")
    last = last or first
    is_valid = all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in (first, last))
    if not is_valid or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"--profile {shorten(text)}: give steps as FIRST-LAST, for example 3-5; if this word is CONFIG, put it "
            "before --profile"
        )
    return int(first), int(last)


class StepProfiler(Observer):
    """Profiles steps ``first`` to ``last`` of rank 0, and writes the profile to ``directory``.

    Steps are counted from the first step of this process, even if it resumes a run. On other ranks,
    ``records`` is False. They only check that the run is long enough, so that all ranks raise the
    same error.
    """

    def __init__(self, first: int, last: int, directory: Path, device: torch.device, *, records: bool):
        self._first, self._last, self._done, self._records = first, last, 0, records
        self._directory, self._cuda = directory, device.type == "cuda"
        self._trace, self._memory = directory / "rank-0-trace.json.gz", directory / "rank-0-memory.pickle"
        self._steps = f"step {first}" if first == last else f"steps {first} to {last}"
        self._profile: profile | None = None

    def on_start(self, start: int, steps: int) -> None:
        left = steps - start
        if self._last > left:
            raise ConfigError(
                f"--profile: step {self._last} is after the end of the run, which has only {left} more "
                "steps; name earlier steps"
            )

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if self._records and self._done == 0:
            self._start()
        yield
        self._done += 1
        if self._profile is not None:
            self._profile.step()
            if self._done == self._last:
                self._write(self._profile)

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            log.warning(
                "WARNING: no profile was written: the run ended after %d step(s), before the end of %s",
                self._done,
                self._steps,
            )

    def _start(self) -> None:
        for path in (self._directory, self._trace, self._memory):
            refuse_link(path)
        try:
            self._directory.mkdir(exist_ok=True)  # the directory of the run exists, unless somebody removed it
        except OSError as error:
            raise WriteError.of(self._directory, error) from None
        warmup = min(1, self._first - 1)  # the first step after the profiler's start is slow
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])],
            schedule=schedule(
                wait=self._first - 1 - warmup, warmup=warmup, active=self._last - self._first + 1, repeat=1
            ),
            record_shapes=True,
            profile_memory=True,
            acc_events=True,
        )
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile.start()

    def _write(self, recorded: profile) -> None:
        recorded.stop()
        self._profile = None
        for path in (self._directory, self._trace, self._memory):
            refuse_link(path)
        try:
            recorded.export_chrome_trace(str(self._trace))
            if self._cuda:
                torch.cuda.memory._dump_snapshot(str(self._memory))
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            raise WriteError.of(self._directory, error) from None
        memory = f"{self._memory} (pytorch.org/memory_viz)" if self._cuda else "no memory snapshot on a CPU"
        log.info("profile of %s: %s (ui.perfetto.dev); %s", self._steps, self._trace, memory)
