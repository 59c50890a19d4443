"""A group, or the coordinator, is lost while ``--resume`` loads a checkpoint. All load it again."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_VOTE, LOAD, Stop, lose_another_in_load
from sdp.tests.support.clusters.stories import COORDINATOR, LAST, STEPS, Story

GROUPS = (0, 1, 2)
NO_STEP = 0  # is made before the checkpoint is loaded


def config_of(corpus: Path, ranks: int = 1, *, sync: bool = False) -> dict[str, Any]:
    config = Story(COORDINATOR, BEFORE_VOTE, ranks).config(corpus)
    config["training"]["evaluate_every"] = 0
    if sync:  # the checkpoint is written in the middle of a round
        config["sdp"] |= {"sync": {"every": LAST - 1}, "check_interval": 0}
    return config


def losses(run: SeparateGroups) -> list[float]:
    return [line["loss"] for line in run.lines("metrics.jsonl")]


def train(folder: Path, config: dict[str, Any], ranks: int = 1) -> list[float]:
    """Train without a loss of a group, and leave the checkpoint of an earlier step as the newest
    one.
    """
    with SeparateGroups(folder, config, ranks, []) as run:
        run.end(GROUPS)
        shutil.rmtree(run.dump_dir / "checkpoints" / f"step-{STEPS}")
        return losses(run)


@pytest.mark.parametrize(
    ("moment", "group", "ranks", "sync"),
    [
        (LOAD, 0, 1, False),  # it writes the files
        (BEFORE_VOTE, 1, 1, False),  # all have loaded
        (LOAD, 1, 2, False),
        pytest.param(BEFORE_VOTE, 0, 2, False, marks=pytest.mark.slow),
        (LOAD, 1, 1, True),
        pytest.param(LOAD, 0, 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_group_is_lost(corpus: Path, tmp_path: Path, moment: str, group: int, ranks: int, sync: bool) -> None:
    config = config_of(corpus, ranks, sync=sync)
    expected = train(tmp_path, config, ranks)
    stop = Stop(moment, (group,), ranks - 1, NO_STEP, tmp_path)
    with SeparateGroups(tmp_path, config, ranks, [stop], resume=True) as run:
        run.wait_for(stop)
        run.lose_ranks(stop)
        run.launch_again(group)
        run.end(GROUPS)
        assert losses(run) == pytest.approx(expected, rel=1e-6), run.said
        assert [line["groups"] for line in run.lines("metrics.jsonl")] == [3] * STEPS
        assert run.said.count(f"group {group} on") == 1, run.said


def test_the_coordinator_is_lost(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus)
    expected = train(tmp_path, config)
    stop = Stop(LOAD, (1,), 0, NO_STEP, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [stop], resume=True) as run:
        run.wait_for(stop)
        run.lose_coordinator(stop)
        run.end(GROUPS)
        assert losses(run) == expected, run.said


@pytest.mark.parametrize("told", [1, 2])
def test_only_some_groups_know_that_all_have_loaded(corpus: Path, tmp_path: Path, told: int) -> None:
    """The coordinator dies while it tells this."""
    config = config_of(corpus)
    expected = train(tmp_path, config)
    with SeparateGroups(tmp_path, config, 1, [], resume=True, last_decision=told) as run:
        run.replace_coordinator()
        run.end(GROUPS)
        assert losses(run) == pytest.approx(expected, rel=1e-6), run.said


def test_a_group_that_has_not_loaded_all_gets_the_state_of_the_others(corpus: Path, tmp_path: Path) -> None:
    """It notices a loss that the others do not notice, because the coordinator dies then."""
    config = config_of(corpus)
    expected = train(tmp_path, config)
    stop = Stop(LOAD, (1,), 0, NO_STEP, tmp_path)
    prepare = partial(lose_another_in_load, stop)
    with SeparateGroups(tmp_path, config, 1, [], prepare=prepare, resume=True) as run:
        run.wait_for(stop)
        run.lose_coordinator(stop)
        run.end(GROUPS)
        assert losses(run) == pytest.approx(expected, rel=1e-6), run.said
