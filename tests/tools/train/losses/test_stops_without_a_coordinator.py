"""The coordinator dies while it tells the groups that all of them, or one of them, shall stop.

Only some groups know it then.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.elastic_runs import MANY
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_STEP, BEFORE_VOTE, Stop
from sdp.tests.support.clusters.stories import COORDINATOR, LAST, STEPS, Story
from sdp.tools.train.stopping import LEAVE_SECONDS

GROUPS = (0, 1, 2)


def run_of(tmp_path: Path, corpus: Path, told: int, *, sync: bool = False) -> tuple[SeparateGroups, Stop]:
    """Return a run whose groups wait before a step. Only ``told`` of them will learn its result."""
    story = Story(COORDINATOR, BEFORE_VOTE)
    config = story.config(corpus)
    config["sdp"]["elastic"]["heartbeat_seconds"] = 8
    if sync:
        config["sdp"] |= {"sync": {"every": 1}, "check_interval": 0}
    stop = Stop(BEFORE_STEP, GROUPS, 0, LAST, tmp_path)
    votes = LAST - 1 + sync  # with local steps, all vote after an evaluation too
    return SeparateGroups(tmp_path, config, 1, [stop], last_decision=len(GROUPS) * votes + told), stop


@pytest.mark.parametrize(("told", "sync"), [(1, False), (2, False), (2, True)])
def test_all_groups_stop_if_some_were_told_to(corpus: Path, tmp_path: Path, told: int, sync: bool) -> None:
    run, stop = run_of(tmp_path, corpus, told, sync=sync)
    with run:
        run.wait_for(stop)
        run.signal_ranks(stop, GROUPS)
        stop.go_on()
        run.replace_coordinator()
        assert run.codes(GROUPS) == [128 + signal.SIGTERM] * 3, run.said
        check_steps(run, LAST)


@pytest.mark.parametrize("told", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_group_leaves_though_some_were_not_told(corpus: Path, tmp_path: Path, told: int) -> None:
    """The group leaves after this step or after the next one. The others make all steps."""
    run, stop = run_of(tmp_path, corpus, told)
    with run:
        run.wait_for(stop)
        run.signal_ranks(stop, [0])
        time.sleep(LEAVE_SECONDS + 0.1)
        stop.go_on()
        run.replace_coordinator()
        assert run.codes(GROUPS) == [128 + signal.SIGTERM, 0, 0], run.said
        check_steps(run, STEPS)


def test_a_group_that_was_not_told_of_the_end_ends_as_the_others_do(corpus: Path, tmp_path: Path) -> None:
    """The others are gone, so nobody holds their units any more. But all is done."""
    story = Story(COORDINATOR, BEFORE_VOTE)
    config = story.config(corpus)
    config["sdp"]["elastic"] |= {"heartbeat_seconds": 4, "wait_seconds": 30}
    decisions = len(GROUPS) * STEPS + 2  # the vote that ends the run: two of three groups are told
    with SeparateGroups(tmp_path, config, 1, [], last_decision=decisions) as run:
        run.replace_coordinator()
        assert run.codes(GROUPS) == [0, 0, 0], run.said
        check_steps(run, STEPS)


def test_a_group_that_is_late_at_a_new_coordinator_starts_again(corpus: Path, tmp_path: Path) -> None:
    """Its step takes longer than the new coordinator waits for it, and it asks meanwhile."""
    story = Story(COORDINATOR, BEFORE_VOTE)
    config = story.config(corpus)
    config["sdp"]["elastic"] |= {"heartbeat_seconds": 2, "restarts": 3}
    config["sdp"]["placement"] = {f"model.layers.{unit}": [*GROUPS] for unit in range(4)}
    config["training"] |= {"steps": MANY, "evaluate_every": 0, "save_every": 0}
    stop = Stop(BEFORE_STEP, (1,), 0, LAST, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [stop]) as run:
        run.wait_for(stop)
        run.lose_coordinator(stop, late=6)
        run.wait_until(lambda: "group 1 on" in run.said and "joined after step" in run.said)
        run.wait_until(lambda: run.lines("metrics.jsonl")[-1]["groups"] == len(GROUPS))
        assert any(line["groups"] == len(GROUPS) - 1 for line in run.lines("metrics.jsonl")), run.said
        assert "did not come back to the coordinator in time" in run.said, run.said
        assert "the others have gone on without this group" in run.said, run.said


def check_steps(run: SeparateGroups, last: int) -> None:
    """Each step is there once, and the last one has a complete checkpoint."""
    lines: list[dict[str, Any]] = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, last + 1)), run.said
    newest = json.loads((run.dump_dir / "checkpoints" / "latest.json").read_text())
    assert f"step-{last}" in str(newest), run.said
