"""``sdp train`` with local steps: metrics, a last average, and resumption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from sdp.engine.distributed.heartbeat import Heartbeat
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of
from sdp.tests.support.forks.command import ForkedCommand
from sdp.tests.support.processes import until
from sdp.tests.support.ranks import RankPool
from sdp.tests.support.small_runs import read_losses, read_metrics, run_sdp, write_config
from sdp.tools.cli import main
from sdp.tools.train.loop.meter import StepMeter


def test_local_steps_from_the_start_to_a_resume(config: dict, tmp_path: Path, capsys) -> None:
    config["sdp"]["sync"] = {"every": 3}
    config["training"] |= {"steps": 8, "save_every": 4, "evaluate_every": 4, "keep": 3}
    config["scheduler"]["params"]["total_num_steps"] = 9
    path, whole = write_config(config, tmp_path), tmp_path / "whole"
    first = run_sdp("train", path, "--dump-dir", whole)
    assert first.returncode == 0, first.stderr
    assert "sync: groups step on their own and average their weights every 3 steps" in first.stderr
    lines = read_metrics(whole)
    averaged = [line["step"] for line in lines if line["comm_bytes_by_kind"].get("between groups/all_reduce")]
    assert averaged == [3, 6, 8], "every three steps, and at the end"
    assert [line["outer_step"] for line in lines if "outer_step" in line] == [1, 2, 3]
    assert all(line["drift"] > 0 and line["outer_grad_norm"] > 0 for line in lines if "outer_step" in line)
    alone = [line for line in lines if "outer_step" not in line]
    assert all(0 < line["comm_bytes_by_kind"]["control/all_reduce"] < 1024 for line in lines)
    assert all(line["comm_bytes"] == line["comm_bytes_by_kind"]["control/all_reduce"] for line in alone)
    summary = json.loads((whole / "summary.json").read_text())
    for rank in summary["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
        assert rank["state_measured"]["outer"] > 0
    assert "anchors and outer state" in first.stdout

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-8")
    second = run_sdp("train", path, "--dump-dir", resumed, "--resume")
    assert second.returncode == 0, second.stderr
    assert read_losses(resumed) == read_losses(whole)
    ours, theirs = (json.loads((run / "summary.json").read_text())["held_out"] for run in (resumed, whole))
    assert ours["after"] == theirs["after"]

    assert main(["evaluate", str(whole)]) == 0
    assert f"{theirs['after']:.4f}" in "".join(capsys.readouterr())


def _seconds_of_a_step(case: Case, delay: float, log: Path) -> dict[str, float]:
    """Seconds of a round's last step, which rank 1 ends ``delay`` seconds late."""
    engine, rank = engine_of(case), dist.get_rank()
    beat = Heartbeat(rank, None, log / f"rank-{rank}.log", print)
    meter, facts = StepMeter(engine, beat), None
    try:
        for step in range(2):  # the first one connects
            meter.begin()
            with meter.timed("backward"):
                engine.backward(engine(models.micro_batch(case.model, step, 0, rank)))
            dist.barrier()
            if rank == 1:
                time.sleep(delay)
            with meter.timed("optimizer"):
                engine.step()
            facts = meter.end()
    finally:
        beat.stop()  # other tests use this process after this one
    assert facts is not None
    return facts.seconds


def test_the_wait_for_an_average_is_not_time_of_another_part(ranks: RankPool, tmp_path: Path) -> None:
    """Averages of weights are awaited after the optimizer's step, and not in the backward pass."""
    waiting, _ = ranks.run(_seconds_of_a_step, Case(2, 1, sync='{"every": 1}'), 1.0, tmp_path, world=2)
    assert 0.8 < waiting["exposed_reduction_seconds"] < 5.0
    assert waiting["backward_seconds"] > 0
    assert 0 < waiting["optimizer_seconds"] < 0.8


def test_sigterm_in_the_middle_of_a_round_loses_nothing(config: dict, tmp_path: Path) -> None:
    """The round is longer than the run, so the run is always stopped inside it."""
    config["sdp"]["sync"] = {"every": 90, "fragments": 6, "overlap": 2, "compression": "int8"}
    config["training"] |= {"steps": 60, "evaluate_every": 0, "save_every": 0}
    config["scheduler"]["params"]["total_num_steps"] = 60
    path, stopped, whole = write_config(config, tmp_path), tmp_path / "stopped", tmp_path / "whole"
    metrics = stopped / "metrics.jsonl"
    with Path(os.devnull).open("w") as null:
        process = ForkedCommand(["train", path, "--dump-dir", stopped], null, null)
    try:
        until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3, seconds=120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.kill()
    lines = read_metrics(stopped)
    assert 3 <= len(lines) < 60
    state = json.loads((stopped / f"checkpoints/step-{len(lines)}/state.json").read_text())
    assert state["sync"]["steps_alone"] > 0
    for run in (run_sdp("train", path, "--dump-dir", stopped, "--resume"), run_sdp("train", path, "--dump-dir", whole)):
        assert run.returncode == 0, run.stderr
    assert read_losses(stopped) == read_losses(whole)
    ours, theirs = (json.loads((run / "summary.json").read_text())["held_out"] for run in (stopped, whole))
    assert ours["after"] == theirs["after"]


LOCAL = {"every": 4}


@pytest.mark.parametrize(
    ("sync", "others", "message"),
    [
        ({"every": 4, "fragments": 3}, {}, "sdp.sync: every 4 is not divisible by fragments 3"),
        ({"every": 4, "fragments": 2, "overlap": 2}, {}, "sdp.sync: overlap 2 must be less than every / fragments = 2"),
        ({"fragments": 2}, {}, "sdp.sync.every: this key is required"),
        (LOCAL, {"training": {"on_spike": "skip"}}, 'training.on_spike: "skip" is not available together with'),
        (LOCAL, {"fp16": {"enabled": True}}, "fp16.enabled: float16 is not available together with sdp.sync"),
        (LOCAL, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'device: "cpu" is not available'),
    ],
)
def test_mistakes_are_one_line(
    config: dict, tmp_path: Path, sync: dict, others: dict, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config["sdp"]["sync"] = sync
    for section, keys in others.items():
        config[section] = config.get(section, {}) | keys
    assert main(["config", str(write_config(config, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert ": :" not in error


def test_one_group_is_allowed_and_told_that_nothing_is_exchanged(config: dict, tmp_path: Path) -> None:
    config["sdp"] |= {"groups": 1, "capacity": 1.0, "sync": {"every": 2}}
    ended = run_sdp("train", write_config(config, tmp_path), "--dump-dir", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert "sdp.sync: there is one group, so nothing is exchanged; the outer optimizer still steps" in ended.stderr
