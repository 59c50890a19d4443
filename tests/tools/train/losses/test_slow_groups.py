"""A group that is slower than the others, or too slow, but that lives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_VOTE, EVALUATION, REDUCTION, SAVE, Stop
from sdp.tests.support.clusters.stories import LAST, RANK, STEPS, Story

LIMIT = 20.0  # seconds of a step, an evaluation or a save
GROUPS = (0, 1, 2)


@pytest.mark.parametrize(
    ("moment", "share"),
    [
        (REDUCTION, 0.6),  # of the limit
        (REDUCTION, 1.4),
        pytest.param(BEFORE_VOTE, 1.4, marks=pytest.mark.slow),
        pytest.param(EVALUATION, 1.4, marks=pytest.mark.slow),
        pytest.param(SAVE, 1.4, marks=pytest.mark.slow),
    ],
)
def test_the_others_wait_as_long_as_it_may_take_and_then_all_try_again(
    corpus: Path, tmp_path: Path, moment: str, share: float
) -> None:
    """Also if ranks wait inside their group for one that waits for the slow group."""
    story = Story(RANK, BEFORE_VOTE)
    config = story.config(corpus)
    # An evaluation has the limit of the start.
    start = LIMIT if moment == EVALUATION else 3 * LIMIT
    config["training"] |= {"step_timeout": LIMIT, "save_timeout": LIMIT, "start_timeout": start}
    stop = Stop(moment, (1,), 0, LAST, tmp_path)
    with SeparateGroups(tmp_path, config, story.ranks, [stop]) as run:
        run.wait_for(stop)
        time.sleep(share * LIMIT)
        stop.go_on()
        run.end(GROUPS)
        lines = run.lines("metrics.jsonl")
    assert "was lost" not in run.said
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["groups"] for line in lines] == [len(GROUPS)] * STEPS
    tries = sum("groups 0, 1, 2 try again, because group" in line for line in run.said.splitlines())
    assert tries == lines[-1]["generation"] - 1 == (share > 1)
