"""Runs that begin before all groups have come, and take the others in when they come."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.cases import RELATIVE
from sdp.tests.support.clusters.elastic_runs import ElasticRun
from sdp.tests.support.clusters.lost_at import SECONDS, SeparateGroups, StaticRuns
from sdp.tests.support.clusters.moments import BEFORE_STEP, BEFORE_VOTE, Stop, die_in_first_meeting
from sdp.tests.support.clusters.stories import COORDINATOR, GATE, STEPS, Story, same_tensors, tensors_of
from sdp.tests.support.forks.command import run_forked

EARLY = (0, 1)
LIVING = (EARLY,) * GATE + ((0, 1, 2),) * (STEPS - GATE)


def config_of(corpus: Path, **more: Any) -> dict[str, Any]:
    """Return the configuration of three groups of which two are enough."""
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus)
    config["sdp"] |= {"survive": 1, **more}
    config["sdp"]["elastic"] |= {"min_groups": 2, "last_call_seconds": 0.5}
    return config


def test_a_late_group_gets_the_state_of_the_others(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus)
    gate = Stop(BEFORE_STEP, EARLY, 0, GATE, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [gate], absent=[2]) as run:
        run.take_back(2, gate)
        run.end([0, 1, 2])
        lines = run.lines("metrics.jsonl")
        assert "the run begins with groups 0, 1; others may join it later: 2" in run.said
    assert [line["groups"] for line in lines] == [len(groups) for groups in LIVING]
    folder = tmp_path / "static"
    folder.mkdir()
    static = StaticRuns(folder, config, 1)
    assert [line["loss"] for line in lines] == pytest.approx(static.losses(LIVING), rel=RELATIVE)
    same_tensors(tensors_of(run.dump_dir / "checkpoints", f"step-{STEPS}"), static.checkpoint(LIVING))
    reported = run_forked("report", run.dump_dir)
    assert reported.returncode == 0, reported.stderr
    assert "3, at least 2, 1 change, generation 2" in reported.stdout


def test_with_local_steps_it_joins_after_a_round(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, sync={"every": 2})
    gate = Stop(BEFORE_STEP, EARLY, 0, GATE, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [gate], absent=[2]) as run:
        run.take_back(2, gate)
        run.end([0, 1, 2])
        lines = run.lines("metrics.jsonl")
    assert [line["groups"] for line in lines] == [len(groups) for groups in LIVING]
    assert not any(line.get("skipped_samples") for line in lines), "what it would have read before is not skipped"


def test_a_run_that_has_begun_before_needs_all_groups(corpus: Path, tmp_path: Path) -> None:
    """Others may train on, if only the coordinator was started again."""
    config = config_of(corpus)
    config["training"]["steps"] = 3
    with SeparateGroups(tmp_path, config, 1, [], absent=[2]) as run:
        run.end(EARLY)
        before = run.lines("metrics.jsonl")
    config["training"]["steps"] = STEPS
    config["sdp"]["elastic"]["wait_seconds"] = 5
    with SeparateGroups(tmp_path, config, 1, [], resume=True, absent=[2]) as run:
        assert run.codes(EARLY) == [1, 1], run.said
        assert "(all are needed, because the directory has .begun or other files of a run that has begun)" in run.said
        assert run.lines("metrics.jsonl") == before


def test_a_group_that_cannot_start_does_not_stop_the_others(corpus: Path, tmp_path: Path) -> None:
    """Under one launch: the launcher knows that the group will not come, so nobody waits."""
    config = config_of(corpus)
    config["sdp"]["elastic"] |= {"restarts": 0, "last_call_seconds": 10 * SECONDS}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    dies = partial(die_in_first_meeting, 2, tmp_path / "died")
    run = ElasticRun(path, tmp_path / "run", prepare=dies)
    assert run.process.wait(SECONDS) == 0, run.said
    assert [line["groups"] for line in run.lines()] == [2] * STEPS
    assert "the run begins with groups 0, 1; others may join it later: 2" in run.said
