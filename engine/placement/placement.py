"""Which SDP group holds which unit: plain data and its guarantees. ``policies.py`` makes placements.

Semantics: a unit u has holders H_u, k_u = |H_u| ≥ 1; the shared part is held by all (Singh et al., arXiv 2507.09029, and this
project's own choices, see docs/specification.md).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ..distributed.mesh import Holders
from ..distributed.traffic import passes_on
from ..errors import PlacementError

COMMUNICATORS = 16  # of a rank, at most, in the placements that draw holder sets: NCCL's buffers cost tens of MB each
WAYS = 4  # communicators a group up to which holders share out what one of them could send
_DENSE = 2048  # sides up to which all singular values at once are cheaper than the two largest by iteration


@dataclass(frozen=True)
class Delivery:
    """The group ``source`` sends something to all other ``members``, which are sorted."""

    source: int
    members: Holders

    def sent_by(self, group: int) -> bool:
        """Whether ``group`` is the source or passes on what it receives."""
        return group in self.members and passes_on(
            self.members.index(group), self.members.index(self.source), len(self.members)
        )


@dataclass(frozen=True)
class Placement:
    """``holders[u]``: the sorted SDP groups that hold the unit ``units[u]``; ``costs[u]``: its number of parameters.

    ``flops[u]``: floating-point operations of its forward pass, empty where the model does not state them. ``bound``: work (FLOPs,
    else parameters) below which the slowest group of no placement with as many holders per unit can be, 0 where none is known.
    """

    groups: int
    units: tuple[str, ...]
    holders: tuple[Holders, ...]
    costs: tuple[int, ...]
    flops: tuple[int, ...] = ()
    bound: int = 0

    def __post_init__(self) -> None:
        for unit, holders in zip(self.units, self.holders, strict=True):
            if not holders:
                raise PlacementError(f"sdp.placement: {unit!r} has no holder; every unit needs at least one group")
            if len(set(holders)) != len(holders):
                raise PlacementError(f"sdp.placement: {unit!r} names a group twice: {list(holders)}")
            if min(holders) < 0 or max(holders) >= self.groups:
                raise PlacementError(
                    f"sdp.placement: {unit!r} is given to group {max(holders)}, but sdp.groups is {self.groups} (groups count from 0)"
                )

    @cached_property
    def holder_sets(self) -> list[Holders]:
        """The distinct holder sets, sorted: one communicator each."""
        return sorted(set(self.holders))

    def holds(self, group: int, unit: int) -> bool:
        return group in self.holders[unit]

    def held_fraction(self, group: int) -> float:
        """Held part of the units' parameters, 0 … 1."""
        return float(self._held[group]) / max(1, sum(self.costs))

    @property
    def work(self) -> tuple[int, ...]:
        """What a unit costs in time: its FLOPs where the model states them, else its parameters."""
        return self.flops or self.costs

    @cached_property
    def loads(self) -> np.ndarray:
        """Work of every group's units, shape (groups,); the shared part, which all have alike, is not in it."""
        return self._sums(self.work)

    @property
    def imbalance(self) -> float:
        """Work of the slowest group over the mean; 1 is perfect balance."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def matrix(self) -> np.ndarray:
        """0/1, shape (groups, units): 1 where the group holds the unit."""
        sets = {holders: index for index, holders in enumerate(self.holder_sets)}
        return self._members.toarray()[:, [sets[holders] for holders in self.holders]]

    @cached_property
    def _members(self) -> sparse.csr_array:
        """0/1, shape (groups, distinct holder sets)."""
        rows = np.fromiter(itertools.chain.from_iterable(self.holder_sets), dtype=np.int64)
        columns = np.repeat(np.arange(len(self.holder_sets)), [len(holders) for holders in self.holder_sets])
        return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(self.groups, len(self.holder_sets)))

    def _sums(self, values: tuple[int, ...]) -> np.ndarray:
        """Sum of the units' ``values`` over what each group holds; exact below 2⁵³."""
        of_set: Counter[Holders] = Counter()
        for holders, value in zip(self.holders, values, strict=True):
            of_set[holders] += value
        return self._members @ np.array([of_set[holders] for holders in self.holder_sets], dtype=float)

    @cached_property
    def _held(self) -> np.ndarray:
        return self._sums(self.costs)

    @cached_property
    def connected(self) -> bool:
        """Whether the group–unit graph is connected through units alone, without the shared part."""
        return len(self.parts()) == 1

    def parts(self) -> list[list[int]]:
        """The groups by part of the group–unit graph, the part of group 0 first; one part if it is connected."""
        if not self.holders:
            return [[group] for group in range(self.groups)]
        graph = sparse.block_array([[None, self._members], [self._members.T, None]])
        of_group = csgraph.connected_components(graph, directed=False)[1][: self.groups]
        return [np.flatnonzero(of_group == part).tolist() for part in dict.fromkeys(of_group.tolist())]

    @property
    def can_be_connected(self) -> bool:
        """Whether so many holders suffice: Σk ≥ groups + units − 1, the edges of a tree."""
        return sum(map(len, self.holders)) >= self.groups + len(self.units) - 1

    @cached_property
    def spectral_gap(self) -> float:
        """1 − σ₂², σ₂ the second singular value of D_group^{-1/2} · matrix · D_unit^{-1/2}; 0 where a group holds no unit."""
        copies = Counter(self.holders)
        return spectral_gap(self._members, [copies[holders] for holders in self.holder_sets])

    @cached_property
    def deliveries(self) -> dict[Holders, tuple[Delivery, ...]]:
        """Holder set that lacks a group → which holder sends its units' weights to which groups without them (backward masking).

        As many holders as can share the work, those with the fewest parameters to send so far, each to its part of the groups. The same
        for all units of a set, and where it can be to groups to which the holder sends already, so that units share communicators. Where
        there would be more than ``WAYS`` of these a group, one holder of a set, of those with the fewest parameters, sends to all.
        """
        sends, costs = Counter[int](), Counter[Holders]()
        known: defaultdict[int, list[frozenset[int]]] = defaultdict(list)  # by source
        for holders, cost in zip(self.holders, self.costs, strict=True):
            costs[holders] += cost
        deliveries: dict[Holders, tuple[Delivery, ...]] = {}
        for holders in sorted((h for h in costs if len(h) < self.groups), key=lambda h: (-costs[h], h)):
            receivers = sorted(set(range(self.groups)).difference(holders))
            sources = sorted(holders, key=lambda group: sends[group])[: len(receivers)]
            sources.sort(
                key=lambda group: all(to.intersection(holders) for to in known[group])
            )  # those with groups to send to first
            ways = _shared_out(sources, receivers, known)
            if sum(to not in known[source] for source, to in ways) + sum(map(len, known.values())) > WAYS * self.groups:
                ways = [(min(holders, key=lambda group: sends[group]), frozenset(receivers))]
            for source, to in ways:
                known[source] += [to] if to not in known[source] else []
            found = tuple(Delivery(source, tuple(sorted({source, *to}))) for source, to in ways)
            for delivery in found:
                sends.update({group: costs[holders] for group in delivery.members if delivery.sent_by(group)})
            deliveries[holders] = found
        return deliveries

    @cached_property
    def _communicators(self) -> np.ndarray:
        return self._members @ np.array([len(holders) > 1 for holders in self.holder_sets], dtype=float)

    def warnings(self) -> list[str]:
        """What a user should know: a graph that is not connected through units, groups without a unit, many communicators."""
        notes = []
        links, needed = sum(map(len, self.holders)), self.groups + len(self.units) - 1
        if not self.connected:
            relation = f"Σk = {links} {'≥' if self.can_be_connected else '<'} groups + units − 1 = {needed}"
            enough = math.ceil(100 * needed / (self.groups * len(self.units))) / 100
            more = "name other holders" if self.can_be_connected else f"a sdp.capacity of {enough:g} or more allows it"
            notes.append(
                f"the groups are connected through the shared part alone ({relation}), where few units are averaged; {more}"
            )
        empty = np.flatnonzero(self._sums((1,) * len(self.units)) == 0).tolist()
        if empty:
            notes.append(f"groups {empty} hold no unit and train the shared part alone")
        most = int(self._communicators.max())
        if most > 4 * COMMUNICATORS:
            notes.append(
                f'a rank takes part in {most} communicators; sdp.placement "balanced" keeps them near {COMMUNICATORS}'
            )
        return notes

    def guarantees(self) -> dict[str, Any]:
        """What holds of this placement, as JSON: fractions of the units' parameters, work in FLOPs or else parameters."""
        return {
            "fewest_holders": min(map(len, self.holders), default=0),
            "held_fractions": [self.held_fraction(group) for group in range(self.groups)],
            "connected_through_units": self.connected,
            "spectral_gap": self.spectral_gap,
            "work": "flops" if self.flops else "parameters",
            "slowest_over_mean": self.imbalance,
            "slowest_over_bound": float(self.loads.max()) / self.bound if self.bound else None,
            "communicators_per_rank": int(self._communicators.max()),
        }

    def describe(self) -> str:
        """One line: units, holders, capacity per group, balance and what is proved of it, connectivity, spectral gap, communicators."""
        counts = [len(holders) for holders in self.holders]
        shown = ",".join(map(str, counts)) if len(counts) <= 32 else f"{min(counts)} to {max(counts)}"
        held = [self.held_fraction(group) for group in range(self.groups)]
        proved = ""
        if self.bound:
            above = float(self.loads.max()) / self.bound - 1
            proved = " (proved the least)" if above <= 0 else f" (proved within {above:.2%} of the least)"
        return (
            f"{len(self.units)} units over {self.groups} groups, k = {shown} (mean {np.mean(counts):.2f}); "
            f"a group holds {min(held):.0%} to {max(held):.0%} of the units' parameters; the slowest group has {self.imbalance:.3f} × the "
            f"mean {'FLOPs' if self.flops else 'parameters'}{proved}; connected through units: {'yes' if self.connected else 'no'}; "
            f"spectral gap {self.spectral_gap:.3f}; at most {int(self._communicators.max())} communicators a rank"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        try:
            holders = tuple(tuple(int(group) for group in held) for held in data["holders"])
            costs, flops = (tuple(int(cost) for cost in values) for values in (data["costs"], data.get("flops", ())))
            return cls(int(data["groups"]), tuple(data["units"]), holders, costs, flops, int(data.get("bound", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise PlacementError(f"placement: not a saved placement ({error!r})") from None


def spectral_gap(members: sparse.csr_array, copies: Sequence[int]) -> float:
    """1 − σ₂² of groups × holder sets (0/1), of which the set s is that of ``copies[s]`` units; 0 where a group holds no unit.

    Equal columns are one, √copies times as long, which changes no singular value but zeros.
    """
    times = np.asarray(copies, dtype=float)
    degrees = members @ times
    if not degrees.all():
        return 0.0
    side = min(len(degrees), len(times))
    if side == 1:
        return 1.0
    scale = np.sqrt(times / members.sum(axis=0))
    normalised = sparse.csr_array(members.multiply(scale[None, :] / np.sqrt(degrees)[:, None]))
    normalised = normalised if side == len(degrees) else sparse.csr_array(normalised.T)
    if side > _DENSE:
        from scipy.sparse import linalg  # imported where it is needed: most groups are few

        values = linalg.eigsh(normalised @ normalised.T, k=2, v0=np.linspace(1, 2, side), return_eigenvectors=False)
        second = np.min(np.asarray(values))
    else:
        rows = normalised if normalised.nnz < 0.02 * len(degrees) * len(times) else normalised.toarray()
        gram = rows @ rows.T
        second = np.linalg.eigvalsh(gram.toarray() if sparse.issparse(gram) else gram)[-2]
    return float(min(1.0, max(0.0, 1 - second)))


def _shared_out(
    sources: Sequence[int], receivers: Sequence[int], known: Mapping[int, Sequence[frozenset[int]]]
) -> list[tuple[int, frozenset[int]]]:
    """Each of ``receivers``, sorted, with one of ``sources``, whose parts differ in size by one at most: a part that is ``known`` where it
    can be, else those that come next after the source, which is the same for many sets of a cyclic placement.
    """
    ways, waiting = [], list(receivers)
    for position, source in enumerate(sources):
        size = -(-len(waiting) // (len(sources) - position))
        to = next((to for to in known.get(source, ()) if len(to) == size and to.issubset(waiting)), None)
        if to is None:
            first = bisect(waiting, source)
            to = frozenset((waiting[first:] + waiting[:first])[:size])
        waiting = [group for group in waiting if group not in to]
        ways.append((source, to))
    return ways
