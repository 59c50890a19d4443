"""``sdp gpu-check``: goals, time limits, failures and reports, with made-up figures."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.errors import ConfigError
from sdp.tools.gpu_check import check as check_module
from sdp.tools.gpu_check.check import Check, TimeIsUp, cut_off_after, expected_seconds
from sdp.tools.gpu_check.goals import Result, goals_of
from sdp.tools.gpu_check.rows import CONFIGS, DENSE, NAMES, UNCOMPILED, Job, Planned, Row, rows
from sdp.tools.gpu_check.share import Share
from sdp.tools.shared.variants import Variant

HALF = Variant(0.5, "block", "forward")


ONE_B = CONFIGS[0]


PLANNED = Planned(500, 1000, 80.0)


@pytest.fixture(autouse=True, scope="module")
def collections_are_short() -> Iterator[None]:
    """A row ends with a collection of garbage, which would look at all modules of all tests."""
    gc.freeze()
    yield
    gc.unfreeze()


def share(**figures: Any) -> Share:
    usual: dict[str, Any] = {
        "parameters": 1, "micro_batch": 4, "tokens_per_step": 100, "state_bytes": 500, "peak_memory_bytes": 1000,
        "before_bytes": 0,
        "requested_bytes": 990, "step_seconds": 1.0, "timed_steps": 5, "flops_per_step": 60.0, "kernels": (),
        "graphs": 1, "loss": 1.0,
    }  # fmt: skip
    return Share(**usual | figures)


def result(row: Row, planned: Planned = PLANNED, **figures: Any) -> Result:
    return Result(row, 1.0, planned, share(**figures))


def test_goals_compare_with_the_plan_and_the_dense_model() -> None:
    dense, half = Row(ONE_B, DENSE), Row(ONE_B, HALF)
    bound = Planned(500, 1000, 40.0)  # half of the dense model's operations: at most twice the tokens
    found = goals_of([result(dense), result(half, bound, peak_memory_bytes=1030, step_seconds=0.5 / 0.94)], rate=100.0)
    assert [(goal.value, goal.reached) for goal in found] == [(0.6, True), (1.03, True), (pytest.approx(0.94), True)]
    assert found[1].text == "llama_1b 0.5 block forward: allocated peak over planned 1.030, aim at most 1.03: reached"
    found = goals_of([result(dense), result(half, bound, peak_memory_bytes=1031, step_seconds=0.54)], rate=121.0)
    assert [goal.reached for goal in found] == [False, False, False]
    assert "NOT reached" in found[0].text
    # No goal of this kind: another way to train, another size's dense model, and a speed without a
    # dense model to compare with.
    others = [
        result(Row(ONE_B, Variant(0.5, "neuron", "forward"))),
        result(Row("llama_134m", DENSE)),
        Result(half, 1.0, error="X: y"),
    ]
    assert goals_of(others, rate=100.0) == []
    assert len(goals_of([result(half)], rate=100.0)) == 1


@pytest.mark.parametrize(
    ("requested", "state", "reached"),
    [(951, 504, [True, True]), (949, 494, [False, False]), (1049, 500, [True, True]), (1051, 506, [False, False])],
)
def test_the_plan_is_held_to_the_program_that_it_is_of_from_both_sides(
    requested: int, state: int, reached: list[bool]
) -> None:
    found = goals_of(
        [result(UNCOMPILED, requested_bytes=requested, state_bytes=state, peak_memory_bytes=9999)], rate=1.0
    )
    assert [goal.reached for goal in found] == reached


def test_a_row_takes_as_long_as_those_before_it_that_are_most_like_it() -> None:
    before = [Result(Row("llama_134m", DENSE), 90.0), Result(Row(ONE_B, DENSE), 30.0), Result(Row(ONE_B, HALF), 10.0)]
    assert expected_seconds(Row(ONE_B, Variant(0.375, "block", "forward")), before) == 30.0
    assert expected_seconds(Row(ONE_B, Variant(0.5, "neuron", "forward")), before) == 30.0
    assert expected_seconds(Row("llama_500m", DENSE), before) == 90.0
    assert expected_seconds(Row(ONE_B, DENSE), []) == 0.0


def test_a_row_is_cut_off_when_time_is_over() -> None:
    with pytest.raises(TimeIsUp), cut_off_after(0.01):
        time.sleep(5)
    with cut_off_after(60.0):
        pass


JOBS = {row: Job({}, index) for index, row in enumerate(rows([ONE_B], NAMES)[:4])}


def measured(outcomes: dict[int, BaseException]) -> Callable[[Job], Share]:
    def measure(job: Job) -> Share:
        if job.sequence in outcomes:
            raise outcomes[job.sequence]
        return share()

    return measure


def test_a_row_that_fails_is_noted_and_the_next_one_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "check.json"
    run = Check({"device": "x"}, 100.0, None, path)
    run.go(JOBS, lambda row: PLANNED, measured({1: ValueError("first line\nsecond")}), lambda: 60.0)
    assert run.conclude() == 1
    report = json.loads(path.read_text())
    assert [row["error"] for row in report["shares"]] == ["", "ValueError: first line", "", ""]
    assert report["finished"] is True
    out = capsys.readouterr().out
    assert "failed: llama_1b 0.75 block forward" in out
    assert list(path.parent.iterdir()) == [path]


def late(row: Row) -> Planned:
    signal.raise_signal(signal.SIGALRM)  # as the timer does
    raise AssertionError


def failing(row: Row) -> Planned:
    raise ValueError("no placement\nsecond")


@pytest.mark.parametrize("tiny", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("plan", "why"),
    [(late, "TimeIsUp: it was not made before no time was left"), (failing, "ValueError: no placement")],
)
def test_a_share_is_kept_where_its_plan_fails_or_is_late(
    plan: Callable[[Row], Planned], why: str, tiny: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (dense, other, *_) = tmp_path / "check.json", JOBS
    run = Check({}, 100.0, None, path, tiny=tiny)
    run.go(
        {row: JOBS[row] for row in (dense, other)},
        lambda row: plan(row) if row == other else PLANNED,
        measured({}),
        lambda: 60.0,
    )
    assert [(found.error, found.plan_error) for found in run.results] == [("", ""), ("", why)]
    assert run.conclude() == 1
    out = capsys.readouterr().out
    assert f"its plan is missing: {why}\n" in out
    assert "100 tokens/s" in out.split(other.name)[1]
    assert "measured, but without a plan: llama_1b 0.75 block forward" in out
    report = json.loads(path.read_text())
    kept = report["shares"][1]
    assert (kept["error"], kept["plan_error"], kept["planned"], kept["peak_over_planned"]) == ("", why, None, None)
    assert (kept["peak_memory_bytes"], kept["mfu"]) == (1000, 0.6)
    assert [(goal["value"], goal["reached"]) for goal in report["goals"]] == [(0.6, True), (None, False), (None, False)]
    assert "aim at most 1.03: not shown, because its plan is missing" in report["goals"][1]["text"]


def test_goals_that_need_the_dense_models_plan_are_not_shown_without_it() -> None:
    dense = Result(Row(ONE_B, DENSE), 1.0, None, share(), plan_error="X: y")
    mfu, peak, speed = goals_of([dense, result(Row(ONE_B, HALF))], rate=100.0)
    assert (mfu.reached, peak.reached, speed.value, speed.reached) == (True, True, None, False)
    assert speed.text.endswith("not shown, because the dense model's plan is missing")
    unplanned = Result(UNCOMPILED, 1.0, None, share(), plan_error="X: y")
    assert [(goal.value, goal.reached) for goal in goals_of([unplanned], rate=100.0)] == 2 * [(None, False)]


def test_the_wait_for_a_plan_is_not_in_the_seconds_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(check_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def measure(job: Job) -> Share:
        now[0] += 3.0
        return share()

    def plan(row: Row) -> Planned:
        now[0] += 20.0
        return PLANNED

    run = Check({}, 100.0, None)
    run.go({row: JOBS[row] for row in list(JOBS)[:1]}, plan, measure, lambda: 60.0)
    assert [(found.planned, found.seconds) for found in run.results] == [(PLANNED, 3.0)]


def test_an_interrupt_keeps_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    run = Check({"device": "x"}, 100.0, None, path)
    with pytest.raises(KeyboardInterrupt):
        run.go(JOBS, lambda row: PLANNED, measured({2: KeyboardInterrupt()}), lambda: 60.0)
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["shares"]] == ["1 dense", "0.75 block forward"]
    assert len(report["goals"]) == 3
    assert report["finished"] is False


def test_rows_for_which_no_time_is_left_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Check({}, 100.0, None, tmp_path / "check.json")
    clock = itertools.chain([1.0, 1.0], itertools.repeat(0.0))
    run.go(JOBS, lambda row: PLANNED, measured({}), lambda: next(clock))
    assert [found.row for found in run.results] == list(JOBS)[:1]
    assert run.conclude() == 1
    assert "no time was left for: llama_1b 0.75 block forward, llama_1b 0.5 block forward" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "check.json").read_text())["not_run"]) == 3


def test_a_row_that_is_cut_off_ends_as_an_error() -> None:
    run = Check({}, 100.0, None)
    clock = itertools.chain([0.02], itertools.repeat(0.01))

    def forever(job: Job) -> Share:
        time.sleep(5)
        raise AssertionError

    run.go(JOBS, lambda row: PLANNED, forever, lambda: next(clock))
    assert [found.error for found in run.results][:1] == ["TimeIsUp: the row was cut off, because no time was left"]


@pytest.mark.parametrize(("tiny", "code"), [(False, 1), (True, 0)])
def test_goals_that_are_missed_end_in_exit_code_1_but_not_of_tiny_models(
    tiny: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {row: job for row, job in JOBS.items() if row.variant == DENSE}
    for rate, expected in ((200.0, code), (100.0, 0)):
        run = Check({}, rate, None, tiny=tiny)
        run.go(jobs, lambda row: PLANNED, measured({}), lambda: 60.0)
        assert run.conclude() == expected
    assert ("1 of 1 goals were not reached" in capsys.readouterr().out) is not tiny


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        check_module.write_report(tmp_path, {})
    assert list(tmp_path.parent.glob("*.new")) == []
