"""``sdp gpu-check``: in its tiny form, all that is not CUDA's own, figures never asserted; what it makes of figures, by made-up ones."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sdp.engine.errors import ConfigError, NonFiniteError
from sdp.tools.gpu_check import check as check_module
from sdp.tools.gpu_check import command
from sdp.tools.gpu_check import share as gpu_share
from sdp.tools.gpu_check.check import Check, Result, TimeIsUp, cut_off_after, expected_seconds, goals_of
from sdp.tools.gpu_check.command import add_arguments
from sdp.tools.gpu_check.rows import CONFIGS, DENSE, NAMES, UNCOMPILED, Job, Planned, Plans, Row, job_of, planned, rows
from sdp.tools.gpu_check.share import (
    FLASH,
    UPDATE,
    Share,
    WrongKernelError,
    measure,
    require_kernels,
    require_training,
    timed,
)
from sdp.tools.shared.variants import Variant

ROOT = Path(command.__file__).parents[2]
NEEDED = {"torch", "numpy", "scipy", "pydantic", "einops", "safetensors", "jinja2"}
HALF = Variant(0.5, "block", "forward")
ONE_B = CONFIGS[0]
PLANNED = Planned(500, 1000, 80.0)


def not_needed() -> list[str]:
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    names = {line.partition("=")[0].rstrip(">") for line in metadata["options"]["install_requires"].split()}
    assert names > NEEDED
    return sorted(names - NEEDED)


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it makes process groups; the packages that it should do without cannot be imported there."""
    lines = [
        "import sys",
        *(f"sys.modules[{name!r}] = None" for name in not_needed()),
        "from sdp.tools.cli import entry",
        "entry()",
    ]
    command = [sys.executable, "-P", "-c", "\n".join(lines), "gpu-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)


def tiny(file: Path, *words: str) -> tuple[dict[str, Any], str]:
    done = check("--device", "cpu", "--tiny", "--json", str(file), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def share(**figures: Any) -> Share:
    usual: dict[str, Any] = {
        "parameters": 1, "micro_batch": 4, "tokens_per_step": 100, "state_bytes": 500, "peak_memory_bytes": 1000, "before_bytes": 0,
        "requested_bytes": 990, "step_seconds": 1.0, "timed_steps": 5, "flops_per_step": 60.0, "kernels": (), "graphs": 1, "loss": 1.0,
    }  # fmt: skip
    return Share(**usual | figures)


def result(row: Row, planned: Planned = PLANNED, **figures: Any) -> Result:
    return Result(row, 1.0, planned, share(**figures))


# -- rows and their plans --------------------------------------------------------------------------------------------------------


def test_rows_that_goals_are_about_come_first_and_share_their_graphs() -> None:
    every = rows(CONFIGS, NAMES)
    assert len(every) == len(set(every)) == 3 * (1 + 3 * 4) + 1
    assert [row.name for row in every[:5]] == [
        "1 dense",
        *(f"{c} block forward" for c in (0.75, 0.5, 0.375)),
        UNCOMPILED.name,
    ]
    goals = [row for row in every if (row.variant.granularity, row.variant.masking) in (("", ""), ("block", "forward"))]
    assert every[: len(goals)] == goals
    families = [family for family, _ in itertools.groupby(every, lambda row: row.family)]
    assert families[:4] == [
        row.family for row in (every[0], UNCOMPILED, Row(CONFIGS[1], DENSE), Row(CONFIGS[2], DENSE))
    ]
    assert rows(["llama_134m"], [UNCOMPILED.name]) == []


def test_rows_of_a_configuration_have_one_micro_batch() -> None:
    jobs = {row: job_of(row) for row in rows(CONFIGS, NAMES)}
    for config in CONFIGS:
        sizes = {job.config["train_micro_batch_size_per_gpu"] for row, job in jobs.items() if row.config == config}
        assert len(sizes) == 1
    assert job_of(UNCOMPILED, micro_batch=3).config["train_micro_batch_size_per_gpu"] == 3
    assert [job_of(row).config["training"]["compile"] for row in (UNCOMPILED, Row(ONE_B, HALF))] == [False, True]


def test_a_variant_of_no_chosen_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="of no configuration but llama_1b"):
        command.run(arguments("--configs", "llama_134m", "--variants", UNCOMPILED.name))


def test_a_process_beside_plans_the_same() -> None:
    row = Row("llama_134m", HALF)
    job = job_of(row, tiny=True)
    with Plans({row: job}, workers=1, device="cuda") as plans:
        here = planned(job, "cuda")
        assert plans.of(row) == here
    assert here.peak_memory_bytes < planned(job, "cpu").peak_memory_bytes
    assert here.flops > 0
    assert here.peak_memory_bytes > here.state_bytes


def test_a_dry_run_lists_what_rows_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.run(arguments("--dry-run", "--tiny", "--configs", "llama_134m", "--variants", "0.5 block forward")) == 0
    )
    assert capsys.readouterr().out.startswith(
        "llama_134m  0.5 block forward               2 x 32 tokens  state   0.00 GiB  peak"
    )


# -- measuring -------------------------------------------------------------------------------------------------------------------


def test_shares_are_measured_beside_their_plan(tmp_path: Path) -> None:
    names = ["1 dense", "0.5 block forward"]
    report, printed = tiny(tmp_path / "new" / "check.json", "--configs", "llama_1b", "--variants", *names)
    assert report["settings"]["bf16_matmul_flops_per_second"] > 0
    assert report["finished"] is True
    assert report["not_run"] == []
    shares = report["shares"]
    assert [(share["config"], share["name"]) for share in shares] == [("llama_1b", name) for name in names]
    layer, shared = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 128 * 32 + 32
    tokens, per_layer = 2 * 32, 3 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 4 * 32 * 32)
    for share in shares:
        assert share["error"] == ""
        assert share["tokens_per_step"] == tokens
        assert share["tokens_per_second"] == pytest.approx(tokens / share["step_seconds"])
        assert share["state_bytes"] == share["planned"]["state_bytes"]
        assert 0 < share["loss"] < 10
        capacity = share["variant"]["capacity"]
        assert share["parameters"] == shared + 8 * capacity * layer
        assert share["state_bytes"] == 16 * share["parameters"]  # weights, gradients and two moments in float32
        assert share["flops_per_step"] == pytest.approx(tokens * (6 * 32 * 128 + 8 * capacity * per_layer))
        assert share["planned"]["flops"] > share["flops_per_step"]  # the configuration recomputes
        assert share["mfu"] > 0
        assert share["peak_over_planned"] == share["peak_memory_bytes"] / share["planned"]["peak_memory_bytes"]
        assert share["kernels"] == sorted([UPDATE, *FLASH["cpu"]])  # of compiled blocks
    assert shares[0]["graphs"] > shares[1]["graphs"]
    assert shares[0]["speed_over_bound"] == 1.0
    faster = shares[1]["tokens_per_second"] / shares[0]["tokens_per_second"]
    assert shares[1]["speed_over_bound"] == pytest.approx(
        faster * shares[1]["planned"]["flops"] / shares[0]["planned"]["flops"]
    )
    assert [goal["text"].split(":")[0] for goal in report["goals"]] == ["llama_1b 1 dense"] + 2 * [
        "llama_1b 0.5 block forward"
    ]
    assert printed.count("tokens/s  MFU") == 2
    assert "collectives return at once, so tokens/s are an upper bound" in printed


@pytest.mark.slow
def test_every_kind_of_share_runs(tmp_path: Path) -> None:
    kinds = [f"0.5 {by} {masking}" for by in ("block", "neuron") for masking in ("forward", "backward")]
    report, _ = tiny(
        tmp_path / "check.json", "--minutes", "60", "--configs", "llama_1b", "--variants", UNCOMPILED.name, *kinds
    )
    shares = {share["name"]: share for share in report["shares"]}
    assert {name: share["error"] for name, share in shares.items()} == dict.fromkeys([*kinds, UNCOMPILED.name], "")
    assert [shares[kind]["mfu"] is not None for kind in kinds] == [True, False, False, False]
    assert shares[UNCOMPILED.name]["graphs"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments("--json", str(tmp_path / "check.json"))) == 0
    assert "torch finds no CUDA device here; nothing was checked" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text()) == {"skipped": "no CUDA device"}


@pytest.mark.parametrize(
    ("operators", "fused", "complaint"),
    [
        (
            {UPDATE, "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward"},
            True,
            None,
        ),
        ({UPDATE, "aten::_scaled_dot_product_cudnn_attention"}, True, None),
        (
            {UPDATE, "aten::_scaled_dot_product_efficient_attention"},
            True,
            "attention ran as aten::_scaled_dot_product_efficient_attention",
        ),
        (
            {UPDATE, "aten::_scaled_dot_product_attention_math"},
            True,
            "attention ran as aten::_scaled_dot_product_attention_math",
        ),
        ({UPDATE, "aten::bmm", "aten::_softmax"}, True, "attention ran as no operator of its own"),
        (
            {"aten::_foreach_add_", "aten::_scaled_dot_product_flash_attention"},
            True,
            "update did not run as aten::_fused_adamw_",
        ),
        ({UPDATE, "aten::_scaled_dot_product_flash_attention"}, False, "update did not run as aten::_fused_adamw_"),
    ],
)
def test_other_kernels_than_meant_are_an_error(operators: set[str], fused: bool, complaint: str | None) -> None:
    groups = [{"fused": True}, {"fused": fused}]
    if complaint is None:
        require_kernels(operators, groups, torch.device("cuda"))
    else:
        with pytest.raises(WrongKernelError, match=complaint):
            require_kernels(operators, groups, torch.device("cuda"))


def test_steps_without_an_update_or_a_loss_are_an_error() -> None:
    require_training(0, 4.2)
    for skipped, loss in ((1, 4.2), (0, float("nan"))):
        with pytest.raises(NonFiniteError, match="what was timed is no training"):
            require_training(skipped, loss)


def test_a_row_fails_where_its_kernels_or_its_steps_are_not_those_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    job, cpu = job_of(UNCOMPILED, tiny=True), torch.device("cpu")
    with (
        monkeypatch.context() as patch,
        pytest.raises(WrongKernelError, match="attention ran as aten::_scaled_dot_product_flash"),
    ):
        patch.setitem(FLASH, "cpu", {"aten::_scaled_dot_product_cudnn_attention"})
        measure(job, cpu, tiny=True)
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="steps were skipped, and the loss is nan"):
        patch.setattr(
            gpu_share,
            "_draw_weights",
            lambda engine, rule: [p.data.fill_(float("nan")) for p in engine.parameters_here.values()],
        )
        job.config["training"]["max_skips"] = 100
        measure(job, cpu, tiny=True)


def test_steps_are_timed_for_so_long_but_no_fewer_than_asked_for() -> None:
    cpu = torch.device("cpu")
    assert len(timed(lambda: None, cpu, least=2, most=4)) == 4
    seconds = timed(lambda: time.sleep(0.002), cpu, least=3, most=100, seconds=0.0)
    assert len(seconds) == 3
    assert min(seconds) >= 0.002


# -- what comes of it ------------------------------------------------------------------------------------------------------------


def test_goals_compare_with_the_plan_and_the_dense_model() -> None:
    dense, half = Row(ONE_B, DENSE), Row(ONE_B, HALF)
    bound = Planned(500, 1000, 40.0)  # half of the dense model's operations: at most twice the tokens
    found = goals_of([result(dense), result(half, bound, peak_memory_bytes=1030, step_seconds=0.5 / 0.94)], rate=100.0)
    assert [(goal.value, goal.reached) for goal in found] == [(0.6, True), (1.03, True), (pytest.approx(0.94), True)]
    assert found[1].text == "llama_1b 0.5 block forward: allocated peak over planned 1.030, aim at most 1.03: reached"
    found = goals_of([result(dense), result(half, bound, peak_memory_bytes=1031, step_seconds=0.54)], rate=121.0)
    assert [goal.reached for goal in found] == [False, False, False]
    assert "NOT reached" in found[0].text
    # No goal of this kind: another way to train, another size's dense model, and a speed without a dense model to compare with.
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


@pytest.mark.parametrize("tiny", [False, True])
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


@pytest.mark.parametrize("minutes", ["nan", "-1", "0", "inf", "soon"])
def test_minutes_are_a_positive_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(f"--minutes={minutes}")
    assert f"argument --minutes: {minutes} is not a positive number of minutes" in capsys.readouterr().err


def test_a_list_of_rows_has_no_figures_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json: has no effect with --dry-run"):
        command.run(arguments("--dry-run", "--json", str(tmp_path / "check.json")))
    assert not list(tmp_path.iterdir())
