"""What is lost in an elastic run and at which moment, and what the run must then have computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.tests.support.cases import RELATIVE

from .elastic_runs import MICRO, elastic_config
from .hosts import HEARTBEAT
from .lost_at import SECONDS, Living, SeparateGroups, StaticRuns, tensors_of
from .moments import BEFORE_STEP, BEFORE_VOTE, ITS_RETURN, REDUCTION, RETURN, SAVE, UPDATE, Stop

STEPS, LAST = 6, 3  # the loss comes in step 3, or in the evaluation or the save that follows
FIRST_LOSS, GATE = 2, 4  # a group that returns is lost in step 2, and the others wait for it in step 4
RANK, GROUP, TWO_GROUPS, HOST, COORDINATOR = "a rank", "a group", "two groups at once", "a host", "the coordinator"
LINK, POWER = "a host's link", "a host's power"  # on hosts in network namespaces
STOPPED = "a stopped rank"  # SIGSTOP
# Who holds the units. Groups 0 and 2, or 1 and 3, hold everything together.
HOLDERS = {3: [[0, 1], [1, 2], [0, 1, 2], [0, 2]], 4: [[0, 1, 2], [0, 2, 3], [0, 1, 3], [2, 3]]}
ONE_HAS_ALL = {3: [[0, 1], [0, 1, 2], [0, 1, 2], [0, 2]], 4: [[0, 1, 2], [0, 1, 2, 3], [0, 1, 3], [1, 2, 3]]}


class Story:
    """What happens in a run, by its kind of loss and its moment.

    Args:
        loss: one of the constants from ``RANK`` to ``STOPPED``; a rank is one of two in its group.
        moment: one of those of :mod:`moments`.
        ranks: the ranks of each group, None for those that are usual with this loss.
        writer: whether the lost rank is the one that writes the run's files, rank 0 of group 0.

    Attributes:
        loss: what is lost.
        moment: when.
        groups: the number of groups.
        ranks: the ranks of each group.
        lost: the groups that are lost at the moment, none with the coordinator.
        stops: the groups that stop at the moment.
        rank: the rank that stops in each of them.
        returns: the group that was lost before, and returns at the moment, or None.
        living: the groups that take part in each step.
        step: the step in which they stop, or after which.
    """

    step = LAST

    def __init__(self, loss: str, moment: str, ranks: int | None = None, *, writer: bool = False):
        self.loss, self.moment = loss, moment
        self.groups = 4 if loss in (TWO_GROUPS, HOST, POWER) else 3
        self.ranks = ranks or (2 if loss in (RANK, LINK, STOPPED) else 1)
        self.rank = 0 if writer else self.ranks - 1
        self.stops = (0, 2) if self.groups == 4 else (0,) if writer else (2,) if moment == ITS_RETURN else (1,)
        self.lost = () if loss == COORDINATOR else self.stops
        if (loss, moment) == (COORDINATOR, UPDATE):
            self.stops = tuple(range(self.groups))  # so all have heard that the step is committed
        self.returns = self.groups - 1 if moment in (RETURN, ITS_RETURN) else None
        everyone = tuple(range(self.groups))
        left = tuple(group for group in everyone if group not in self.lost)
        first = LAST if moment in (REDUCTION, BEFORE_VOTE) else LAST + 1  # step without the lost groups
        self.living: Living = (everyone,) * (first - 1) + (left,) * (STEPS + 1 - first)
        if self.returns is not None:
            before = (everyone,) * (FIRST_LOSS - 1) + (everyone[:-1],) * (GATE + 1 - FIRST_LOSS)
            self.living = before + (left,) * (STEPS - GATE)

    def config(self, corpus: Path) -> dict[str, Any]:
        """Return the configuration. Its SGD shows gradients of a wrong scale, and its momentum is
        state that a returning group must get.
        """
        # Only the loss of a link or power and a stopped rank are noticed by a missing heartbeat.
        # For other losses it is longer than the test may take, so a test that waits for it fails.
        heartbeat = HEARTBEAT if self.loss in (LINK, POWER, STOPPED) else 2 * SECONDS
        config = elastic_config(corpus, steps=STEPS, groups=self.groups, restarts=0, heartbeat_seconds=heartbeat)
        del config["sdp"]["capacity"], config["sdp"]["survive"]
        holders = (HOLDERS if self.returns is None else ONE_HAS_ALL)[self.groups]
        if self.stops == (0,):  # groups 0 and 1 change places, so that what is left holds everything
            holders = [sorted({0: 1, 1: 0}.get(group, group) for group in groups) for groups in holders]
        config["sdp"]["placement"] = {f"model.layers.{unit}": groups for unit, groups in enumerate(holders)}
        config["sdp"]["masking"] = "backward" if self.groups == 4 else "forward"
        config["scheduler"]["params"]["decay_num_steps"] = 2
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}
        config["zero_optimization"] = {"stage": 3 if self.ranks > 1 else 0}
        config["training"] |= {"evaluate_every": LAST, "save_every": LAST, "keep": STEPS}
        return config


class Checked:
    """Compares elastic runs with runs without elastic groups, which it makes once for each setting.

    Args:
        folder: a new one for the files of such runs, at each call.
    """

    def __init__(self, folder: Callable[[], Path]):
        self._folder, self._made = folder, dict[str, StaticRuns]()

    def check(self, run: SeparateGroups, story: Story, config: dict[str, Any]) -> None:
        """Losses, weights and optimizer state are those of runs with only the living groups."""
        key = str((config["sdp"], story.ranks))
        if key not in self._made:
            self._made[key] = StaticRuns(self._folder(), config, story.ranks)
        expected = self._made[key]
        losses = [line["loss"] for line in run.lines("metrics.jsonl")]
        assert losses == pytest.approx(expected.losses(story.living), rel=RELATIVE)
        for step in (LAST, STEPS):
            ours = tensors_of(run.dump_dir / "checkpoints", f"step-{step}")
            same_tensors(ours, expected.checkpoint(story.living[:step]))


@contextmanager
def run_to_the_moment(
    story: Story, config: dict[str, Any], folder: Path, make: Callable[..., SeparateGroups] = SeparateGroups
) -> Iterator[tuple[SeparateGroups, Stop]]:
    """Yield the run when its groups have stopped at the moment of the story, and this stop.

    Args:
        story: what happens.
        config: the configuration of the run.
        folder: for all files.
        make: makes the run.
    """
    stop = Stop(story.moment, story.stops, story.rank, story.step, folder)
    first = Stop(BEFORE_VOTE, (story.groups - 1,), 0, FIRST_LOSS, folder)
    gate = Stop(BEFORE_STEP, tuple(range(story.groups - 1)), 0, GATE, folder)
    stops = [stop] if story.returns is None else [first, gate, stop]
    with make(folder, config, story.ranks, stops) as run:
        if story.returns is not None:
            run.wait_for(first)
            run.lose_host(first)
            run.take_back(story.returns, gate)
        run.wait_for(stop)
        if story.moment == SAVE:
            assert not [*run.dump_dir.glob("checkpoints/step-*")], "a checkpoint appears when it is complete"
        yield run, stop


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
    expected = [*first, *story.lost]
    assert len(lost) >= len(expected) and set(lost) == set(expected), run.said


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        tolerance = 2 * RELATIVE * tensor.abs().max().item()
        if name.startswith("outer/"):  # it sums differences of weights, and has their rounding
            weight = theirs[f"model/{name.removeprefix('outer/').rpartition('/')[0]}"]
            tolerance += 2 * torch.finfo(weight.dtype).eps * weight.abs().max().item()
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance, msg=name)
