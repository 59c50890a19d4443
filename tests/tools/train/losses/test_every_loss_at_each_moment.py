"""Each kind of loss at each moment of a run. The groups that are left end with the weights of a run
that has only them.

The death of a host is here that of its launches with all of their groups, all on loopback. The
loss of a whole group is in ``tests/engine/elastic/test_each_moment.py``. The loss of a host's link
is in ``tests/cluster/test_lost_groups.py``, at no particular moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.tests.support.cases import RELATIVE
from sdp.tests.support.clusters.elastic_runs import MICRO, elastic_config
from sdp.tests.support.clusters.lost_at import SECONDS, Living, SeparateGroups, StaticRuns, tensors_of
from sdp.tests.support.clusters.moments import (
    BEFORE_STEP,
    BEFORE_VOTE,
    EVALUATION,
    MOMENTS,
    REDUCTION,
    RETURN,
    SAVE,
    UPDATE,
    Stop,
)

STEPS, LAST = 6, 3  # the loss comes in step 3, or in the evaluation or the save that follows
FIRST_LOSS, GATE = 2, 4  # a group that returns is lost in step 2, and the others wait for it in step 4
RANK, TWO_GROUPS, HOST, COORDINATOR = "a rank", "two groups at once", "a host", "the coordinator"
# Who holds the units. Groups 0 and 2, or 1 and 3, hold everything together.
HOLDERS = {3: [[0, 1], [1, 2], [0, 1, 2], [0, 2]], 4: [[0, 1, 2], [0, 2, 3], [0, 1, 3], [2, 3]]}
ONE_HAS_ALL = {3: [[0, 1], [0, 1, 2], [0, 1, 2], [0, 2]], 4: [[0, 1, 2], [0, 1, 2, 3], [0, 1, 3], [1, 2, 3]]}


class Story:
    """What happens in a run, by its kind of loss and its moment.

    Attributes:
        groups: the number of groups.
        ranks: the ranks of each group.
        lost: the groups that are lost at the moment, none with the coordinator.
        stops: the groups that stop at the moment.
        returns: the group that was lost before, and returns at the moment, or None.
        living: the groups that take part in each step.
    """

    def __init__(self, loss: str, moment: str):
        self.groups, self.ranks = (4, 1) if loss in (TWO_GROUPS, HOST) else (3, 2 if loss == RANK else 1)
        self.stops = (0, 2) if self.groups == 4 else (1,)
        self.lost = () if loss == COORDINATOR else self.stops
        if (loss, moment) == (COORDINATOR, UPDATE):
            self.stops = tuple(range(self.groups))  # so all have heard that the step is committed
        self.returns = self.groups - 1 if moment == RETURN else None
        everyone = tuple(range(self.groups))
        left = tuple(group for group in everyone if group not in self.lost)
        first = LAST if moment in (REDUCTION, BEFORE_VOTE) else LAST + 1  # step without the lost groups
        self.living: Living = (everyone,) * (first - 1) + (left,) * (STEPS + 1 - first)
        if self.returns is not None:
            before = (everyone,) * (FIRST_LOSS - 1) + (everyone[:-1],) * (GATE + 1 - FIRST_LOSS)
            self.living = before + (left,) * (STEPS - GATE)

    def config(self, corpus: Path) -> dict[str, Any]:
        """SGD shows a wrong scale, and momentum is a state that a group must bring along."""
        # Nothing may wait for a heartbeat: the test would fail first.
        config = elastic_config(corpus, steps=STEPS, groups=self.groups, restarts=0, heartbeat_seconds=2 * SECONDS)
        del config["sdp"]["capacity"], config["sdp"]["survive"]
        holders = (HOLDERS if self.returns is None else ONE_HAS_ALL)[self.groups]
        config["sdp"]["placement"] = {f"model.layers.{unit}": groups for unit, groups in enumerate(holders)}
        config["sdp"]["masking"] = "backward" if self.groups == 4 else "forward"
        config["scheduler"]["params"]["decay_num_steps"] = 2
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}
        config["zero_optimization"] = {"stage": 3 if self.ranks > 1 else 0}
        config["training"] |= {"evaluate_every": LAST, "save_every": LAST, "keep": STEPS}
        return config


@pytest.fixture(scope="module")
def static_runs() -> dict[str, StaticRuns]:
    """Those that were made, because several tests compare with the same ones."""
    return {}


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
    corpus: Path, tmp_path: Path, static_runs: dict[str, StaticRuns], tmp_path_factory: Any, loss: str, moment: str
) -> None:
    story = Story(loss, moment)
    config = story.config(corpus)
    stop = Stop(moment, story.stops, story.ranks - 1, LAST, tmp_path)
    first = Stop(BEFORE_VOTE, (story.groups - 1,), 0, FIRST_LOSS, tmp_path)
    gate = Stop(BEFORE_STEP, tuple(range(story.groups - 1)), 0, GATE, tmp_path)
    stops = [stop] if story.returns is None else [first, gate, stop]
    with SeparateGroups(tmp_path, config, story.ranks, stops) as run:
        if story.returns is not None:
            run.wait_for(first)
            run.lose_host(first)
            run.take_back(story.returns, gate)
        run.wait_for(stop)
        if moment == SAVE:
            assert not [*run.dump_dir.glob("checkpoints/step-*")], "a checkpoint appears when it is complete"
        lose = {HOST: run.lose_host, COORDINATOR: run.lose_coordinator}.get(loss, run.lose_ranks)
        lose(stop)
        run.end(story.living[-1])
        check_files(run, story)
    check_training(run, story, config, static_runs, tmp_path_factory)


@pytest.mark.parametrize("told", [1, 2])
def test_the_coordinator_dies_when_it_has_told_a_decision_to_some(
    corpus: Path, tmp_path: Path, static_runs: dict[str, StaticRuns], tmp_path_factory: Any, told: int
) -> None:
    """Those that were told have committed the step, and the others commit it when they meet."""
    story = Story(COORDINATOR, BEFORE_VOTE)
    config = story.config(corpus)
    decisions = story.groups * (LAST - 1) + told
    with SeparateGroups(tmp_path, config, story.ranks, [], last_decision=decisions) as run:
        run.replace_coordinator()
        run.end(story.living[-1])
        check_files(run, story)
    check_training(run, story, config, static_runs, tmp_path_factory)


def check_training(
    run: SeparateGroups,
    story: Story,
    config: dict[str, Any],
    static_runs: dict[str, StaticRuns],
    tmp_path_factory: Any,
) -> None:
    """Losses, weights and optimizer state are those of runs that have only the living groups."""
    key = str((config["sdp"], story.ranks))
    if key not in static_runs:
        static_runs[key] = StaticRuns(tmp_path_factory.mktemp("static"), config, story.ranks)
    expected = static_runs[key]
    losses = [line["loss"] for line in run.lines("metrics.jsonl")]
    assert losses == pytest.approx(expected.losses(story.living), rel=RELATIVE)
    for step in (LAST, STEPS):
        same_tensors(tensors_of(run.dump_dir / "checkpoints", f"step-{step}"), expected.checkpoint(story.living[:step]))


def check_files(run: SeparateGroups, story: Story) -> None:
    """Each step, sample and evaluation is there once, and each checkpoint is complete."""
    lines, samples = run.lines("metrics.jsonl"), 0
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, groups in zip(lines, story.living, strict=True):
        samples += len(groups) * story.ranks * MICRO
        assert (line["groups"], line["samples"]) == (len(groups), samples), run.said
    assert [line["step"] for line in run.lines("evaluations.jsonl")] == [0, LAST, STEPS]
    names = sorted(path.name for path in (run.dump_dir / "checkpoints").iterdir())
    assert names == ["latest.json", f"step-{LAST}", f"step-{STEPS}"]
    first = () if story.returns is None else (story.returns,)
    lost = [
        int(line.split(" group ")[1].split()[0]) for line in run.said.splitlines() if " was lost after step" in line
    ]
    assert sorted(set(lost)) == sorted({*first, *story.lost}), run.said


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        largest = tensor.abs().max().item()
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=2 * RELATIVE * largest, msg=name)
