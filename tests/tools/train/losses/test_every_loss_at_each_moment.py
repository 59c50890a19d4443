"""Each kind of loss at each moment of a run. The groups that are left end with the weights of a run
that has only them.

The death of a host is here that of its launches with all of their groups, all on loopback. Links
and hosts in network namespaces are in ``tests/cluster/test_hosts_lost_at_moments.py``.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import (
    BEFORE_VOTE,
    EVALUATED,
    EVALUATION,
    IN_FILE,
    ITS_RETURN,
    MOMENTS,
    REDUCTION,
    RETURN,
    SAVE,
    UPDATE,
    Stop,
)
from sdp.tests.support.clusters.stories import (
    COORDINATOR,
    GROUP,
    HOST,
    LAST,
    RANK,
    STEPS,
    STOPPED,
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
ROUTINE = [(RANK, REDUCTION), (RANK, EVALUATION), (RANK, RETURN), (TWO_GROUPS, SAVE)]
ROUTINE += [(GROUP, BEFORE_VOTE), (GROUP, ITS_RETURN), (STOPPED, REDUCTION)]
ROUTINE += [(COORDINATOR, UPDATE)]  # the coordinator dies before a vote in a test below


@pytest.mark.parametrize(
    ("loss", "moment"),
    [
        pytest.param(loss, moment, marks=[] if (loss, moment) in ROUTINE else pytest.mark.slow)
        for loss in (RANK, GROUP, TWO_GROUPS, HOST, COORDINATOR, STOPPED)
        for moment in (*MOMENTS, *([ITS_RETURN] if loss not in (TWO_GROUPS, HOST) else []))
    ],
)
def test_nothing_is_lost_but_the_lost(
    corpus: Path, tmp_path: Path, static_runs: Checked, loss: str, moment: str
) -> None:
    story = Story(loss, moment)
    config = story.config(corpus)
    with run_to_the_moment(story, config, tmp_path) as (run, stop):
        others = {HOST: run.lose_host, COORDINATOR: run.lose_coordinator, STOPPED: run.stop_ranks}
        others.get(loss, run.lose_ranks)(stop)
        run.end(story.living[-1])
        check_files(run, story)
    static_runs.check(run, story, config)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_rank_that_writes_the_files_is_lost(
    corpus: Path, tmp_path: Path, static_runs: Checked, moment: str
) -> None:
    """Rank 0 of group 0, where the groups meet. The other rank of its group ends, too."""
    story = Story(RANK, moment, writer=True)
    config = story.config(corpus)
    with run_to_the_moment(story, config, tmp_path) as (run, stop):
        run.lose_ranks(stop)
        run.end(story.living[-1])
        check_files(run, story)
    static_runs.check(run, story, config)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_with_deepspeed_a_rank_is_lost(corpus: Path, tmp_path: Path, static_runs: Checked, moment: str) -> None:
    """The static runs have the engine deepspeed, too. ZeRO 3 shards the group's state."""
    story = Story(RANK, moment)
    config = story.config(corpus)
    config["sdp"] |= {"engine": "deepspeed", "masking": "backward"}
    with run_to_the_moment(story, config, tmp_path) as (run, stop):
        run.lose_ranks(stop)
        run.end(story.living[-1])
        check_files(run, story)
    static_runs.check(run, story, config)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        (2, 1),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("moment", [EVALUATED, IN_FILE])
def test_a_writer_dies_between_two_of_the_files(corpus: Path, tmp_path: Path, moment: str) -> None:
    """The next writer writes the evaluation, and the step into the curves."""
    config = Story(COORDINATOR, BEFORE_VOTE).config(corpus) | {"csv_monitor": {"enabled": True}}
    stop = Stop(moment, (0,), 0, LAST, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [stop]) as run:
        run.wait_for(stop)
        run.lose_ranks(stop)
        run.end((1, 2))
        lines, evaluations = run.lines("metrics.jsonl"), run.lines("evaluations.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), run.said
    assert [line["step"] for line in evaluations] == [0, LAST, STEPS]
    for name, expected in (("Train_Samples_train_loss", lines), ("Eval_loss", evaluations)):
        with (run.dump_dir / "csv" / f"{name}.csv").open(newline="") as file:
            points = [(int(step), float(loss)) for step, loss in list(csv.reader(file))[1:]]
        assert points == [(line["step"], line["loss"]) for line in expected]
