"""Local steps (``sdp.sync``) in an elastic run: what a group gets that joins between two rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..backends.sharded import ShardedBackend
from ..optim import optimizer_state
from ..optim.optimizer_state import OptimizerState
from .returning import (
    copy_value,
    has_state,
    named_units,
    received_here,
    sources_of,
    state_tensors,
    tensors_of_units,
    transfer,
)


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
    def of(cls, backend: ShardedBackend) -> LocalFacts:
        """Return what this rank's group has."""
        local = backend.local
        assert local is not None
        keys = (key for key, anchor in local.outer.anchors.items() if local.outer.optimizer.state.get(anchor))
        return cls(has_state(backend), frozenset(local.parameter_of(key).unit for key in keys))

    def to_json(self) -> dict[str, Any]:
        """Return this as :func:`from_json` takes it."""
        return {"has_stepped": self.has_stepped, "outer": sorted(self.outer)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LocalFacts:
        """Return the result of :func:`to_json` as it was."""
        return cls(values["has_stepped"], frozenset(values["outer"]))


def exchange_between_rounds(
    backend: ShardedBackend, fresh: Sequence[int], states: Mapping[int, LocalFacts], *, loaded: Collection[str] = ()
) -> int:
    """Send and receive all that groups without state need, once all others have the anchors.

    Collective among the living ranks.

    A receiver gets the anchors, the state of the outer optimizer, and the means of the holders'
    inner moments.

    Args:
        backend: the backend, connected to the living groups.
        fresh: the groups without state, by their numbers in its layout.
        states: what each group with state has.
        loaded: units of this group whose state comes from a checkpoint.

    Returns:
        The bytes that this rank sent or received.
    """
    messages = sources_of(backend.layout, fresh)
    moved = transfer(backend, messages, lambda _, units: tensors_of_units(backend, units, None), copy_value)
    moved += _exchange_outer_state(backend, messages, fresh, states, loaded)
    return moved + _average_moments(backend, fresh, states)


def _exchange_outer_state(
    backend: ShardedBackend,
    messages: Mapping[tuple[int, int], list[str]],
    fresh: Sequence[int],
    states: Mapping[int, LocalFacts],
    loaded: Collection[str],
) -> int:
    local = backend.local
    assert local is not None
    outer = local.outer
    if backend.at.sdp in fresh:
        local.reset()
        anchors = (anchor for key, anchor in outer.anchors.items() if local.parameter_of(key).unit in loaded)
        kept = {anchor: outer.optimizer.state.get(anchor) for anchor in anchors}
        optimizer_state.clear(outer.optimizer)
        optimizer_state.materialise_state(outer.optimizer)
        stepped = {
            unit for (source, _), units in received_here(backend, messages) for unit in states[source].outer & {*units}
        }
        for key, anchor in outer.anchors.items():
            if local.parameter_of(key).unit not in stepped:
                outer.optimizer.state.pop(anchor, None)
        outer.optimizer.state.update({anchor: state for anchor, state in kept.items() if state})
    state = OptimizerState(outer.optimizer)

    def tensors_of(source: int, units: Sequence[str]) -> Iterator[torch.Tensor]:
        for unit in units:
            for anchor in local.anchors_of(unit) if unit in states[source].outer else ():
                yield from state_tensors(state, anchor)

    moved = transfer(backend, messages, tensors_of, copy_value)
    if backend.at.sdp in fresh:
        state.write_back()
    return moved


def _average_moments(backend: ShardedBackend, fresh: Sequence[int], states: Mapping[int, LocalFacts]) -> int:
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
        for held in chain.from_iterable(map(backend.held_of, units)):
            yield from state_tensors(state, held)

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
