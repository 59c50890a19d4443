"""Every sample of a run with losses counts once, or is reported as skipped.

The ranks note the samples themselves, by their content.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from sdp.tests.support.clusters.elastic_runs import MICRO
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_STEP, BEFORE_VOTE, REDUCTION, UPDATE, Stop
from sdp.tests.support.clusters.samples import Noted, note_and_stop
from sdp.tests.support.clusters.stories import COORDINATOR, FIRST_LOSS, GATE, STEPS, Story

GROUPS = (0, 1, 2)
EVERY = 3


@pytest.mark.parametrize("moment", [REDUCTION, UPDATE])
def test_each_sample_counts_once(corpus: Path, tmp_path: Path, moment: str) -> None:
    """A group dies in step 2, before or after its vote, and is back in step 5."""
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus)
    stop, gate = Stop(moment, (1,), 0, FIRST_LOSS, tmp_path), Stop(BEFORE_STEP, (0, 2), 0, GATE, tmp_path)
    notes = partial(note_and_stop, tmp_path, [stop, gate])
    with SeparateGroups(tmp_path, config, 1, [], prepare=notes) as run:
        run.wait_for(stop)
        run.lose_host(stop)
        run.take_back(1, gate)
        run.end(GROUPS)
        lines = run.lines("metrics.jsonl")
    noted, last = Noted(tmp_path), {group: {} for group in GROUPS}
    for group in GROUPS:
        last[group] = dict(noted.read(group))  # of a step that was repeated, the last attempt
    away = range(FIRST_LOSS + (moment == UPDATE), GATE + 1)
    before = 0
    for line in lines:
        step = line["step"]
        living = [group for group in GROUPS if group != 1 or step not in away]
        read = [position for group in living for position in last[group][step]]
        assert sorted(read) == list(range(before, line["samples"])), f"step {step}: {run.said}"
        before = line["samples"]
    assert len(lines) == STEPS


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_with_local_steps_the_others_read_nothing_that_is_skipped(corpus: Path, tmp_path: Path, masking: str) -> None:
    """A group dies in the second step of the second round, and is back in the last round."""
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus)
    config["sdp"] |= {
        "sync": {"every": EVERY},
        "masking": masking,
        "check_interval": 0,
    }  # groups vote after comparisons, too
    config["training"] |= {"steps": 4 * EVERY, "evaluate_every": 0, "save_every": 0}
    dies, gate = EVERY + 2, 2 * EVERY + 1
    stop, wait = Stop(BEFORE_STEP, (1,), 0, dies, tmp_path), Stop(BEFORE_STEP, (0, 2), 0, gate, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [], prepare=partial(note_and_stop, tmp_path, [stop, wait])) as run:
        run.wait_for(stop)
        run.lose_host(stop)
        run.take_back(1, wait)
        run.end(GROUPS)
        lines = run.lines("metrics.jsonl")
    noted = Noted(tmp_path)
    lost = [position for step, positions in noted.read(1) if EVERY < step < dies for position in positions]
    counted = [
        position
        for group in GROUPS
        for step, positions in noted.read(group)
        if group != 1 or step <= EVERY or step > gate
        for position in positions
    ]
    assert len(counted) == len(set(counted)), "no sample is read twice"
    skipped = set(range(lines[-1]["samples"])) - set(counted)
    assert len(skipped) == lines[-1]["skipped_samples"] == EVERY * MICRO
    assert set(lost) < skipped, "what the lost group read counts as skipped"
    assert f"{EVERY * MICRO} samples of group 1 in the {EVERY} steps of an unfinished round are skipped" in run.said
    for group in (0, 2):
        inside = [step for step in noted.votes(group) if 0 < step < 4 * EVERY]
        expected = [EVERY, 2 * EVERY, 3 * EVERY]
        # With frozen copies, all vote again when the next round begins and the copies have come.
        assert inside == (expected if masking == "forward" else sorted(2 * expected)), "votes in each round"
