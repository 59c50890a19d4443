"""A group is lost while the run begins, before anything has the state of the run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_STEP, BEFORE_VOTE, RETURN, Stop, die_in_first_meeting
from sdp.tests.support.clusters.stories import COORDINATOR, FIRST_LOSS, GATE, LAST, RANK, STEPS, Story

GROUPS = (0, 1, 2)


def config_of(corpus: Path, steps: int, **elastic: Any) -> dict[str, Any]:
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus)
    config["training"]["steps"] = steps
    config["sdp"]["elastic"] |= elastic
    return config


def losses(run: SeparateGroups) -> list[float]:
    return [line["loss"] for line in run.lines("metrics.jsonl")]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_run_begins_when_the_group_is_back(corpus: Path, tmp_path: Path, lost: int) -> None:
    """Also if it is the group that writes the files, and with ``--resume``."""
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    with SeparateGroups(undisturbed, config_of(corpus, STEPS), 1, []) as run:
        run.end(GROUPS)
        expected = losses(run)
    for last, resume in ((LAST, False), (STEPS, True)):
        dies = partial(die_in_first_meeting, lost, tmp_path / f"died before {last}")
        with SeparateGroups(tmp_path, config_of(corpus, last), 1, [], prepare=dies, resume=resume) as run:
            run.launch_again(lost)
            run.end(GROUPS)
            assert losses(run) == expected[:last], run.said
            assert [line["groups"] for line in run.lines("metrics.jsonl")] == [3] * last


def test_a_run_that_cannot_begin_leaves_a_checkpoint_as_it_was(corpus: Path, tmp_path: Path) -> None:
    with SeparateGroups(tmp_path, config_of(corpus, LAST), 1, []) as run:
        run.end(GROUPS)
        expected = losses(run)
    dies = partial(die_in_first_meeting, 1, tmp_path / "died")
    config = config_of(corpus, STEPS, wait_seconds=5)
    with SeparateGroups(tmp_path, config, 1, [], prepare=dies, resume=True) as run:
        assert run.codes((0, 2)) == [1, 1], run.said
        assert "not all groups came within 5 s" in run.said
        assert losses(run) == expected
        assert [path.name for path in (run.dump_dir / "checkpoints").glob("step-*")] == [f"step-{LAST}"]


def test_a_group_that_did_not_get_the_state_does_not_go_on_alone(corpus: Path, tmp_path: Path) -> None:
    config = Story(RANK, RETURN).config(corpus)
    config["zero_optimization"] = {"stage": 0}
    config["sdp"]["placement"] = {f"model.layers.{unit}": [0, 1, 2] for unit in range(4)}
    first = Stop(BEFORE_VOTE, (2,), 0, FIRST_LOSS, tmp_path)
    gate = Stop(BEFORE_STEP, (0, 1), 0, GATE, tmp_path)
    stop = Stop(RETURN, (0, 1), 0, LAST, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [first, gate, stop]) as run:
        run.wait_for(first)
        run.lose_host(first)
        run.take_back(2, gate)
        run.wait_for(stop)
        before = losses(run)
        run.lose_host(stop)
        assert run.codes([2]) == [1], run.said
        assert "all groups that had the state of the run are lost" in run.said
        assert losses(run) == before
