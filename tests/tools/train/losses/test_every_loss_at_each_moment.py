"""Each kind of loss at each moment of a run. The groups that are left end with the weights of a run
that has only them.

The death of a host is here that of its launches with all of their groups, all on loopback. Links
and hosts in network namespaces are in ``tests/cluster/test_hosts_lost_at_moments.py``. The loss of
a whole group is in ``tests/engine/elastic/test_each_moment.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_VOTE, EVALUATION, MOMENTS, REDUCTION, RETURN, SAVE, UPDATE
from sdp.tests.support.clusters.stories import (
    COORDINATOR,
    HOST,
    LAST,
    RANK,
    TWO_GROUPS,
    Checked,
    Story,
    check_files,
    run_to_the_moment,
)


@pytest.fixture(scope="module")
def static_runs(tmp_path_factory: Any) -> Checked:
    """Those that were made, because several tests compare with the same ones."""
    return Checked(lambda: tmp_path_factory.mktemp("static"))


# For the engine, a host's death is that of two groups. So it is tested less often.
ROUTINE = [(RANK, REDUCTION), (RANK, EVALUATION), (RANK, RETURN), (TWO_GROUPS, UPDATE), (TWO_GROUPS, SAVE)]
ROUTINE += [(TWO_GROUPS, RETURN), *((COORDINATOR, moment) for moment in (BEFORE_VOTE, UPDATE, RETURN))]


@pytest.mark.parametrize(
    ("loss", "moment"),
    [
        pytest.param(loss, moment, marks=[] if (loss, moment) in ROUTINE else pytest.mark.slow)
        for loss in (RANK, TWO_GROUPS, HOST, COORDINATOR)
        for moment in MOMENTS
    ],
)
def test_nothing_is_lost_but_the_lost(
    corpus: Path, tmp_path: Path, static_runs: Checked, loss: str, moment: str
) -> None:
    story = Story(loss, moment)
    config = story.config(corpus)
    with run_to_the_moment(story, config, tmp_path) as (run, stop):
        lose = {HOST: run.lose_host, COORDINATOR: run.lose_coordinator}.get(loss, run.lose_ranks)
        lose(stop)
        run.end(story.living[-1])
        check_files(run, story)
    static_runs.check(run, story, config)


@pytest.mark.parametrize(("ranks", "told"), [(1, 1), (1, 2), (2, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_the_coordinator_dies_when_it_has_told_a_decision_to_some(
    corpus: Path, tmp_path: Path, static_runs: Checked, ranks: int, told: int
) -> None:
    """Those that were told have committed the step, and the others commit it when they meet.

    They may be in one group.
    """
    story = Story(COORDINATOR, BEFORE_VOTE, ranks)
    config = story.config(corpus)
    decisions = story.groups * story.ranks * (LAST - 1) + told
    with SeparateGroups(tmp_path, config, story.ranks, [], last_decision=decisions) as run:
        run.replace_coordinator()
        run.end(story.living[-1])
        check_files(run, story)
    static_runs.check(run, story, config)
