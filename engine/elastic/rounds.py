"""Local steps (``sdp.sync``) in an elastic run: what all living groups agree on, and when.

Inside a round nothing crosses between groups, so the loss of a group disturbs no other one. When
the groups agree, they first sum what each of them saw in its steps since the last time. If an
average is due, they reduce the changes of their weights. Then they vote. Only if all have voted,
the outer optimizer steps on the anchors. Otherwise nothing has changed, and the living groups agree
again: the average is then that of the living holders. The changes of a group that is lost in a
round are lost, with what it learned from its samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..backends.fsdp2.backend import FSDP2Backend
from ..backends.local_steps import ShardedLocalSteps
from ..engine import SDPEngine
from ..local_steps import LocalUpdate, PendingUpdate
from ..optim import optimizer_state
from ..optim.optimizer_state import OptimizerState
from .returning import (
    copy_value,
    has_state,
    members_of,
    named_units,
    received_here,
    sources_of,
    state_tensors,
    tensors_of_units,
    transfer,
)


def fsdp2_backend(engine: SDPEngine) -> FSDP2Backend:
    """Return the backend of an elastic engine, which is always that of FSDP2."""
    assert isinstance(engine.backend, FSDP2Backend)
    return engine.backend


class _OwnStep(NamedTuple):
    """This rank's part of the outcome of a step."""

    loss: float
    norm: float
    update: PendingUpdate


class ElasticRounds:
    """The rounds of one rank.

    Args:
        engine: the engine, whose groups begin with local steps.
    """

    def __init__(self, engine: SDPEngine):
        self._engine, self._training = engine, engine.local_training
        self._steps: list[_OwnStep] = []  # since all groups agreed last
        self._training.is_elastic = True
        self._local.tell = self._tell

    @property
    def _backend(self) -> FSDP2Backend:
        return fsdp2_backend(self._engine)

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


# -- a returning group -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalFacts:
    """What a group with state has, with local steps.

    Attributes:
        has_stepped: whether the inner optimizer has state.
        outer: the units for which the outer optimizer has state.
    """

    has_stepped: bool
    outer: frozenset[str]

    @classmethod
    def of(cls, backend: FSDP2Backend) -> LocalFacts:
        """Return what this rank's group has."""
        assert backend.local is not None
        outer, infos = backend.local.outer, backend.layout.parameters
        names = (name for name, anchor in outer.anchors.items() if outer.optimizer.state.get(anchor))
        return cls(has_state(backend), frozenset(infos[name].unit for name in names))

    def to_json(self) -> dict[str, Any]:
        """Return this as :func:`from_json` takes it."""
        return {"has_stepped": self.has_stepped, "outer": sorted(self.outer)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LocalFacts:
        """Return the result of :func:`to_json` as it was."""
        return cls(values["has_stepped"], frozenset(values["outer"]))


def exchange_between_rounds(backend: FSDP2Backend, fresh: Sequence[int], states: Mapping[int, LocalFacts]) -> int:
    """Send and receive all that groups without state need, once all others have the anchors.

    Collective among the living ranks.

    A receiver gets the anchors, the state of the outer optimizer, and the means of the holders'
    inner moments.

    Args:
        backend: the backend, connected to the living groups.
        fresh: the groups without state, by their numbers in its layout.
        states: what each group with state has.

    Returns:
        The bytes that this rank sent or received.
    """
    messages = sources_of(backend.layout, fresh)
    moved = transfer(backend, messages, lambda _, units: tensors_of_units(backend, units, None), copy_value)
    moved += _exchange_outer_state(backend, messages, fresh, states)
    return moved + _average_moments(backend, fresh, states)


def _exchange_outer_state(
    backend: FSDP2Backend,
    messages: Mapping[tuple[int, int], list[str]],
    fresh: Sequence[int],
    states: Mapping[int, LocalFacts],
) -> int:
    assert backend.local is not None
    outer = backend.local.outer
    if backend.at.sdp in fresh:
        backend.local.reset()
        optimizer_state.clear(outer.optimizer)
        optimizer_state.materialise_state(outer.optimizer)
        stepped = {
            unit for (source, _), units in received_here(backend, messages) for unit in states[source].outer & {*units}
        }
        for name, anchor in outer.anchors.items():
            if backend.layout.parameters[name].unit not in stepped:
                outer.optimizer.state.pop(anchor, None)
    state = OptimizerState(outer.optimizer)

    def tensors_of(source: int, units: Sequence[str]) -> Iterator[torch.Tensor]:
        for info in members_of(backend, [unit for unit in units if unit in states[source].outer]):
            if info.name in outer.anchors:
                yield from state_tensors(state, outer.anchors[info.name], info.canonical)

    moved = transfer(backend, messages, tensors_of, copy_value)
    if backend.at.sdp in fresh:
        state.write_back()
    return moved


def _average_moments(backend: FSDP2Backend, fresh: Sequence[int], states: Mapping[int, LocalFacts]) -> int:
    """Give groups without state the mean of the inner moments of each unit's living holders."""
    ready = [group for group in backend.layout.everyone if group not in fresh and states[group].has_stepped]
    messages = {
        (source, receiver): units
        for receiver in fresh
        for source in ready
        if (units := [unit for unit, holders in named_units(backend.layout) if {source, receiver} <= {*holders}])
    }
    state = OptimizerState(backend.basic_optimizer)

    def tensors_of(_: int, units: Sequence[str]) -> Iterator[torch.Tensor]:
        for info in members_of(backend, units):
            yield from state_tensors(state, backend.parameters[info.name], info.canonical)

    received = received_here(backend, messages)
    for _, units in received:
        for tensor in tensors_of(0, units):
            tensor.zero_()
    moved = transfer(backend, messages, tensors_of, _add)
    counts = Counter(unit for _, units in received for unit in units)
    for unit, count in counts.items():
        for tensor in tensors_of(0, [unit]):
            if tensor.dim():
                tensor.div_(count)
    if received:
        state.write_back()
    return moved


def _add(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Add moments. Of counts of steps, keep the largest."""
    if tensor.dim():
        tensor.add_(value)
    else:
        tensor.copy_(torch.maximum(tensor, value))
