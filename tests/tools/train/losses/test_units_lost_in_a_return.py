"""A group is lost while another one returns, and with both the units that only they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_STEP, BEFORE_VOTE, RETURN, Stop
from sdp.tests.support.clusters.stories import COORDINATOR, FIRST_LOSS, GATE, STEPS, Story


@pytest.mark.parametrize("every", [0, 3])
def test_all_evaluate_before_they_go_on(corpus: Path, tmp_path: Path, every: int) -> None:
    """The units come from a checkpoint, so the model has changed. The group that was about to make
    a step must evaluate first, as the one that returns does. Otherwise each waits for the other.
    """
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus)
    config["sdp"]["placement"] |= {"model.layers.1": [1, 2]}
    config["training"] |= {"evaluate_every": 1, "save_every": 1, "step_timeout": 3600, "start_timeout": 3600}
    if every:
        config["sdp"] |= {"sync": {"every": every}}
    first = Stop(BEFORE_VOTE, (2,), 0, FIRST_LOSS, tmp_path)
    gate = Stop(BEFORE_STEP, (0, 1), 0, GATE, tmp_path)
    stop = Stop(RETURN, (1,), 0, GATE, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [first, gate, stop]) as run:
        run.wait_for(first)
        run.lose_host(first)
        run.take_back(2, gate)
        run.wait_for(stop)
        run.lose_host(stop)
        run.end((0, 2))
        lines = run.lines("metrics.jsonl")
    assert "group 2 brings 'model.layers.1' (1 units) back from a checkpoint" in run.said
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), run.said
    assert [line["groups"] for line in lines][-1] == 2
