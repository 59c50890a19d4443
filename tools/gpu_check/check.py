"""The GPU check: rows measured within a time limit, and the goals they must reach."""

from __future__ import annotations

import gc
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from ...engine.accounting.quantities import format_bytes
from ...engine.errors import ConfigError
from ..shared.files import write_whole
from .goals import Result, goals_of, name_of, speed_over_bound
from .rows import Job, Planned, Row
from .share import Share

T = TypeVar("T")


class TimeIsUp(BaseException):  # not an Exception, so that no library catches it
    """The time limit has passed."""


class Check:
    """The rows measured so far, printed and written as they come."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        rate: float,
        nominal: float | None,
        path: Path | None = None,
        tiny: bool = False,
        device: torch.device | None = None,
    ):
        self._settings, self._rate, self._nominal, self._path, self._tiny = settings, rate, nominal, path, tiny
        self._device = device or torch.device("cpu")
        self.results: list[Result] = []
        self.not_run: list[Row] = []
        self._write(finished=False)

    def go(
        self,
        jobs: Mapping[Row, Job],
        plan: Callable[[Row], Planned],
        measure: Callable[[Job], Share],
        seconds_left: Callable[[], float],
    ) -> None:
        """Measure every row for which time is left.

        If a row fails, note it and begin the next one.
        """
        for row, job in jobs.items():
            if expected_seconds(row, self.results) >= seconds_left():
                self.not_run.append(row)
                continue
            if self.results and self.results[-1].row.family != row.family:
                torch.compiler.reset()  # graphs of the blocks before would count against the limit of recompilations
            self.results.append(self._one(row, job, plan, measure, seconds_left()))
            print(self._line(self.results[-1]), flush=True)
            self._write(finished=False)

    def _one(
        self, row: Row, job: Job, plan: Callable[[Row], Planned], measure: Callable[[Job], Share], seconds_left: float
    ) -> Result:
        started = time.perf_counter()
        share, error = _tried(lambda: measure(job), seconds_left, "the row was cut off, because no time was left")
        gc.collect()  # only here: an exception's frames hold the model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - started  # without the wait for the plan, which is made in another process
        planned, plan_error = None, ""
        if not error:
            planned, plan_error = _tried(
                lambda: plan(row), seconds_left - seconds, "it was not made before no time was left"
            )
        return Result(row, seconds, planned, share, error, plan_error)

    def conclude(self) -> int:
        """Print the goals and what was not measured, and return the exit code."""
        goals = goals_of(self.results, self._rate)
        for goal in goals:
            print(goal.text)
        failed = [result for result in self.results if result.error]
        unplanned = [result for result in self.results if result.plan_error]
        missed = [] if self._tiny else [goal for goal in goals if not goal.reached]
        if self.not_run:
            print(f"no time was left for: {', '.join(name_of(row) for row in self.not_run)}; --minutes gives them more")
        if failed:
            print(f"failed: {', '.join(name_of(result.row) for result in failed)}")
        if unplanned:
            print(f"measured, but without a plan: {', '.join(name_of(result.row) for result in unplanned)}")
        if missed:
            print(f"{len(missed)} of {len(goals)} goals were not reached")
        self._write(finished=True)
        return 1 if self.not_run or failed or unplanned or missed else 0

    def _write(self, *, finished: bool) -> None:
        write_report(
            self._path,
            {
                "finished": finished,
                "settings": self._settings,
                "shares": [self._to_json(result) for result in self.results],
                "goals": [asdict(goal) for goal in goals_of(self.results, self._rate)],
                "not_run": [name_of(row) for row in self.not_run],
            },
        )

    def _to_json(self, result: Result) -> dict[str, Any]:
        row, share, planned = result.row, result.share, result.planned
        said: dict[str, Any] = {
            "config": row.config, "name": row.name, "variant": asdict(row.variant), "compiled": row.compiled,
            "seconds": result.seconds,
            "error": result.error, "plan_error": result.plan_error, "planned": planned and asdict(planned),
        }  # fmt: skip
        if share is None:
            return said
        return said | share.to_json() | {
            "mfu": share.mfu(self._rate),
            "mfu_of_nominal": self._nominal and share.mfu(self._nominal),
            "peak_over_planned": planned and share.over_planned(planned),
            "requested_over_planned": planned and share.requested_over_planned(planned),
            "speed_over_bound": speed_over_bound(result, self.results),
        }  # fmt: skip

    def _line(self, result: Result) -> str:
        name, share, planned = f"{result.row.config:<12}{result.row.name:<30}", result.share, result.planned
        if share is None:
            return f"{name}{result.error}"
        mfu, nominal, bound = share.mfu(self._rate), self._nominal, speed_over_bound(result, self.results)
        requested = planned and share.requested_over_planned(planned)
        of_planned = "" if planned is None else f" ({share.over_planned(planned):.3f} of planned"
        of_planned += "" if planned is None else f"{'' if requested is None else f', requested {requested:.3f}'})"
        of_nominal = f" ({share.mfu(nominal):.1%} of the data sheet's)" if nominal and mfu is not None else ""
        return (
            f"{name}{share.parameters / 1e6:8.1f} M parameters  state {format_bytes(share.state_bytes, 'GiB'):>10}  "
            f"peak {format_bytes(share.peak_memory_bytes, 'GiB'):>10} allocated{of_planned}  "
            f"{share.tokens_per_second:10,.0f} tokens/s{'' if mfu is None else f'  MFU {mfu:5.1%}{of_nominal}'}"
            f"{'' if bound is None else f'  {bound:.3f} of the bound'}  [{result.seconds:.0f} s]"
            f"{result.plan_error and f'{chr(10)}{name}its plan is missing: {result.plan_error}'}"
        )


def _tried(work: Callable[[], T], seconds: float, late: str) -> tuple[T | None, str]:
    """Return the result of ``work``, or None and the reason: its exception, or ``late`` after
    ``seconds``.
    """
    try:
        with cut_off_after(seconds):
            return work(), ""
    except TimeIsUp:
        return None, f"TimeIsUp: {late}"
    except Exception as raised:  # keep the rows before this one, and try those after it
        traceback.print_exc()
        return None, f"{type(raised).__name__}: {str(raised).strip().partition(chr(10))[0]}"


def expected_seconds(row: Row, results: Sequence[Result]) -> float:
    """Estimate the seconds of ``row``: those of the slowest earlier row that is most like it,
    or 0.
    """
    similar = (
        [result.seconds for result in results if result.row.family == row.family],
        [result.seconds for result in results if result.row.config == row.config],
        [result.seconds for result in results],
    )
    return max(next((seconds for seconds in similar if seconds), [0.0]))


@contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeIsUp` inside the block, in the main thread, once the time is over."""

    def up(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, up)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report whole or not at all. Raises :class:`ConfigError` if it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from None
