"""A group, or the coordinator, is lost while ``--resume`` loads a checkpoint. All load it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import (
    BEFORE_VOTE,
    LOAD,
    LOADED,
    Stop,
    die_before_the_start_is_written,
    lose_another_in_load,
)
from sdp.tests.support.clusters.stories import COORDINATOR, LAST, STEPS, Story

GROUPS = (0, 1, 2)
NO_STEP = 0  # is made before the checkpoint is loaded


def config_of(corpus: Path, ranks: int = 1, settings: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    config = Story(COORDINATOR, BEFORE_VOTE, ranks).config(corpus)
    config["training"]["evaluate_every"] = 0
    config["sdp"] |= settings
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


SYNC = {"sync": {"every": LAST - 1}, "check_interval": 0}  # the checkpoint is inside a round
DEEPSPEED = {"engine": "deepspeed", "masking": "backward"}
SCHEDULE = {"masking": [{"until": LAST - 1, "masking": "backward"}, {"masking": "forward"}]}  # it is behind a switch


@pytest.mark.parametrize(
    ("moment", "group", "ranks", "settings"),
    [
        pytest.param(LOAD, 0, 1, {}, marks=pytest.mark.slow),  # it writes the files
        (LOADED, 1, 1, SCHEDULE),
        (LOAD, 1, 2, {}),
        pytest.param(LOADED, 0, 2, {}, marks=pytest.mark.slow),
        pytest.param(LOAD, 1, 1, SYNC, marks=pytest.mark.slow),
        (LOADED, 1, 1, SYNC),
        pytest.param(LOAD, 0, 2, SYNC, marks=pytest.mark.slow),
        pytest.param(LOADED, 1, 2, DEEPSPEED, marks=pytest.mark.slow),
        pytest.param(LOAD, 0, 2, SYNC | DEEPSPEED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_group_is_lost(
    corpus: Path, tmp_path: Path, moment: str, group: int, ranks: int, settings: dict[str, Any]
) -> None:
    config = config_of(corpus, ranks, settings)
    expected = train(tmp_path, config, ranks)
    stop = Stop(moment, (group,), ranks - 1, NO_STEP, tmp_path)
    with SeparateGroups(tmp_path, config, ranks, [stop], resume=True) as run:
        run.wait_for(stop)
        run.lose_ranks(stop)
        run.launch_again(group)
        run.end(GROUPS)
        assert losses(run) == pytest.approx(expected, rel=1e-6), run.said
        assert [line["groups"] for line in run.lines("metrics.jsonl")] == [3] * STEPS
        assert run.said.count(f"sdp: group {group} on") == 1 and "skipped;" not in run.said, run.said


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), SYNC], ids=str)
def test_the_writer_is_lost_before_it_wrote(corpus: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The next one replaces the lines after the checkpoint, and writes the configuration."""
    config = config_of(corpus, 1, settings)
    train(tmp_path, config)
    dies = partial(die_before_the_start_is_written, tmp_path / "died")
    config["steps_per_print"] = 2
    with SeparateGroups(tmp_path, config, 1, [], prepare=dies, resume=True) as run:
        assert run.codes(GROUPS) == [1, 0, 0], run.said
        lines = run.lines("metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, STEPS + 1)], run.said
        assert [line["groups"] for line in lines[LAST + 1 :]] == [2] * (STEPS - LAST - 1)
        assert json.loads((run.dump_dir / "config.json").read_text())["steps_per_print"] == 2


def test_the_coordinator_is_lost(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus)
    expected = train(tmp_path, config)
    stop = Stop(LOAD, (1,), 0, NO_STEP, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [stop], resume=True) as run:
        run.wait_for(stop)
        run.lose_coordinator(stop)
        run.end(GROUPS)
        assert losses(run) == expected, run.said


@pytest.mark.parametrize("told", [pytest.param(1, marks=pytest.mark.slow), 2])
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
