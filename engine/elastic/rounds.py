"""Local steps (``sdp.sync``) in an elastic run: what all living groups agree on, and when.

Inside a round nothing crosses between groups, so the loss of a group disturbs no other one. When
the groups agree, they first sum what each of them saw in its steps since the last time. If an
average is due, they reduce the changes of their weights. Then they vote. Only if all have voted,
the outer optimizer steps on the anchors. Otherwise nothing has changed, and the living groups agree
again: the average is then that of the living holders. The changes of a group that is lost in a
round are lost, with what it learned from its samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from ..backends.local_steps import ShardedLocalSteps
from ..backends.sharded import ShardedBackend
from ..distributed.agreement import gather_json
from ..engine import SDPEngine
from ..local_steps import LocalUpdate, PendingUpdate


def sharded_backend(engine: SDPEngine) -> ShardedBackend:
    """Return the backend of an elastic engine, which has one process per rank."""
    assert isinstance(engine.backend, ShardedBackend)
    return engine.backend


class _OwnStep(NamedTuple):
    """This rank's part of the outcome of a step."""

    loss: float
    norm: float
    update: PendingUpdate


class GivenUp(NamedTuple):
    """A round whose changes all groups gave up: its steps, its samples, and its groups."""

    steps: int
    samples: int
    groups: Sequence[int]


class Untold(NamedTuple):
    """What a rank has not told the others yet, as JSON values.

    Attributes:
        slot: the rank's group.
        outcomes: the loss and the norm of each step.
        rows: what else the ranks exchange about each step.
    """

    slot: int
    outcomes: list[list[float]]
    rows: list[list[int]]


class ElasticRounds:
    """The rounds of one rank.

    Args:
        engine: the engine, whose groups begin with local steps.

    Attributes:
        given_up: the last round that all groups gave up, until it is reset.
        told: for each rank that told something about that round, a list of integers for each step,
            until it is reset.
    """

    def __init__(self, engine: SDPEngine):
        self._engine, self._training = engine, engine.local_training
        self._steps: list[_OwnStep] = []  # since all groups agreed last
        self.given_up: GivenUp | None = None  # until the user has been told
        self.told = list[list[list[int]]]()
        self._training.is_elastic = True
        self._local.tell = self._tell

    @property
    def _backend(self) -> ShardedBackend:
        return sharded_backend(self._engine)

    @property
    def _local(self) -> ShardedLocalSteps:
        local = self._backend.local
        assert local is not None, "sdp.sync.start_after is refused in an elastic run"
        return local

    def _tell(self, loss: float, norm: float) -> PendingUpdate:
        step = _OwnStep(loss, norm, PendingUpdate(None))
        self._steps.append(step)
        return step.update

    @property
    def untold(self) -> int:
        """The number of steps that this rank made since all groups agreed last."""
        return len(self._steps)

    @property
    def steps_alone(self) -> int:
        """The number of steps since all groups had the anchors last."""
        return self._engine.global_steps - self._training.since

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether an average is due now.

        Args:
            is_last: whether the run ends with the present step.
        """
        return self.steps_alone > 0 and (is_last or self._training.ends_round(self._engine.global_steps))

    def agree(self, commit: Callable[[], object], *, is_last: bool) -> bool:
        """Tell each other the outcome of steps, and average if that is due. Collective.

        Args:
            commit: votes, when all reductions are done. If it raises, nothing has changed, and this
                may be called again.
            is_last: whether the run ends with the present step.

        Returns:
            Whether the groups have averaged.
        """
        local, due = self._local, self.is_due(is_last=is_last)
        self._backend.shard_parameters()
        self._training.last = None
        if due:
            local.start(0)
        outcomes = self._sum_outcomes()
        if due:
            self._training.note_average(self._engine.global_steps, local.arrive(commit))
        else:
            commit()
        steps, self._steps = self._steps, []
        for step, outcome in zip(steps, outcomes, strict=True):
            step.update.set(outcome)
        return due

    def _sum_outcomes(self) -> list[LocalUpdate]:
        """Return the outcomes of the steps, over all living groups. Collective."""
        if not self._steps:
            return []
        rows = [self._local.summary(step.loss, step.norm) for step in self._steps]
        totals = torch.tensor(rows, dtype=torch.float64, device=self._backend.device)
        self._backend.all_reduce_control(totals)
        return [self._local.outcome(total) for total in totals]

    def note_losses(self, before: Collection[int], stayed: Collection[int], samples: int) -> int:
        """Count the samples that lost groups read in the present round as skipped.

        Args:
            before: the groups of the last generation.
            stayed: those that are in the new one, and kept their state.
            samples: the samples of one group in a step.

        Returns:
            The number of these samples.
        """
        skipped = len(set(before) - set(stayed)) * samples * self.steps_alone
        self._training.skipped_samples += skipped
        return skipped

    def give_up(self, groups: Sequence[int]) -> None:
        """Return to the anchors in the middle of a round. Not collective.

        The round's samples count as skipped.

        Args:
            groups: those that began the round.
        """
        steps, engine = self.steps_alone, self._engine
        if steps == 0:
            return
        samples = steps * len(groups) * (engine.train_batch_size() // engine.layout.mesh.sdp)
        self._local.give_up()
        self._training.note_round_given_up(engine.global_steps, samples)
        self.given_up = GivenUp(steps, samples, groups)

    def tell_each_other(
        self, slot: int, rows: Callable[[], list[list[int]]], *, always: bool = False
    ) -> list[Untold] | None:
        """Exchange the outcomes of steps that groups have not told each other yet. Collective.

        If all ranks have equally many, nothing is done, because the next vote exchanges them.
        Groups that gave up a round have such steps, and returning groups have none.

        Args:
            slot: this rank's group.
            rows: returns what else the ranks exchange about each step.
            always: exchange them in any case, because there will be no next vote.

        Returns:
            What each rank told that had something to tell, or None if nothing was exchanged.
        """
        if len(set(gather_json(self.untold))) == 1 and not always:
            return None
        outcomes = [[step.loss, step.norm] for step in self._steps]
        return [each for each in (Untold(*each) for each in gather_json([slot, outcomes, rows()])) if each.outcomes]

    def take(self, told: Sequence[Untold]) -> None:
        """Note the outcome of this rank's steps, of which only the groups in ``told`` know."""
        if not self._steps:
            return
        first = {each.slot: each for each in reversed(told)}.values()
        for index, step in enumerate(self._steps):
            norms = [norm for norm in (each.outcomes[index][1] for each in first) if math.isfinite(norm)]
            step.update.set(
                LocalUpdate(
                    loss=sum(each.outcomes[index][0] for each in told) / len(told),
                    norm=sum(norms) / len(norms) if norms else math.nan,
                    skipped=len(first) - len(norms),
                )
            )
        self._steps, self.told = [], [each.rows for each in told]
