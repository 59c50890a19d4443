"""Which group holds which unit, and which messages between groups follow from this.

A unit u has the holders H_u, and k_u = |H_u| ≥ 1. All groups hold the shared part (Singh et al.,
arXiv 2507.09029, and this project's own choices, see docs/specification.md). ``policies.py``
chooses the holders.

The messages are planned before the run: which gradients are averaged in one message, and which
frozen copies are refreshed in one message.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..distributed.mesh import Holders, passes_on
from ..errors import PlacementError

COMMUNICATORS = 16  # limit per rank if holder sets are computed; NCCL's buffers cost tens of MB for each
WAYS = 4  # holders share the sending of a unit up to so many communicators per group


@dataclass(frozen=True)
class Delivery:
    """A message between groups: ``source`` sends data to all other groups in ``members``.

    ``members`` are sorted, and include the source.
    """

    source: int
    members: Holders

    def sent_by(self, group: int) -> bool:
        """Return whether ``group`` sends data: it is the source, or forwards data to a member."""
        return group in self.members and passes_on(
            self.members.index(group), self.members.index(self.source), len(self.members)
        )


@dataclass(frozen=True)
class Placement:
    """The choice of holders for every unit. It is fixed for the whole run.

    Attributes:
        groups: number of SDP groups.
        units: the names of the units.
        holders: ``holders[u]`` are the sorted groups that hold ``units[u]``.
        costs: number of parameters of each unit.
        flops: floating-point operations of each unit's forward pass. Empty if the model does not
            state them.
    """

    groups: int
    units: tuple[str, ...]
    holders: tuple[Holders, ...]
    costs: tuple[int, ...]
    flops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for unit, holders in zip(self.units, self.holders, strict=True):
            if not holders:
                raise PlacementError(f"sdp.placement: {unit!r} has no holder; every unit needs at least one group")
            if len(set(holders)) != len(holders):
                raise PlacementError(f"sdp.placement: {unit!r} names a group twice: {list(holders)}")
            if min(holders) < 0 or max(holders) >= self.groups:
                raise PlacementError(
                    f"sdp.placement: {unit!r} has the holder {max(holders)}, but sdp.groups is {self.groups} (groups "
                    "count from 0)"
                )

    @cached_property
    def holder_sets(self) -> list[Holders]:
        """The different sets of groups that hold a unit, sorted. Each set has one communicator."""
        return sorted(set(self.holders))

    def holds(self, group: int, unit: int) -> bool:
        return group in self.holders[unit]

    def held_fraction(self, group: int) -> float:
        """Return the fraction of the units' parameters that ``group`` holds, 0 … 1."""
        return float(self._held[group]) / max(1, sum(self.costs))

    @property
    def work(self) -> tuple[int, ...]:
        """The work of each unit: its FLOPs if the model states them, else its parameters."""
        return self.flops or self.costs

    @cached_property
    def loads(self) -> np.ndarray:
        """The summed ``work`` of the units that each group holds, shape (groups,)."""
        return self._sums(self.work)

    @property
    def imbalance(self) -> float:
        """Work of the slowest group divided by the mean work of a group. 1 is perfect balance."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @cached_property
    def _members(self) -> np.ndarray:
        """1 if a group is in a holder set, else 0; shape (groups, distinct holder sets)."""
        members = np.zeros((self.groups, len(self.holder_sets)))
        for column, holders in enumerate(self.holder_sets):
            members[list(holders), column] = 1
        return members

    def _sums(self, values: tuple[int, ...]) -> np.ndarray:
        of_set: Counter[Holders] = Counter()
        for holders, value in zip(self.holders, values, strict=True):
            of_set[holders] += value
        return self._members @ np.array([of_set[holders] for holders in self.holder_sets], dtype=float)

    @cached_property
    def _held(self) -> np.ndarray:
        return self._sums(self.costs)

    @cached_property
    def connected(self) -> bool:
        """Whether common units connect all groups, directly or through other groups."""
        return len(self.components()) == 1

    def components(self) -> list[list[int]]:
        """Return a list for each set of groups that units connect. Group 0 is in the first list."""
        root = list(range(self.groups))  # the first group of each group's component
        for holders in self.holder_sets:
            joined = {root[group] for group in holders}
            root = [min(joined) if first in joined else first for first in root]
        return [[group for group in range(self.groups) if root[group] == first] for first in dict.fromkeys(root)]

    @property
    def links(self) -> int:
        """The number of holders of all units together, Σ k_u."""
        return sum(map(len, self.holders))

    @property
    def links_needed(self) -> int:
        """The least number of holders, of all units together, that can connect all groups."""
        return self.groups + len(self.units) - 1

    @property
    def can_be_connected(self) -> bool:
        """Whether units could connect all groups if the same number of holders were placed well."""
        return self.links >= self.links_needed

    @cached_property
    def deliveries(self) -> dict[Holders, tuple[Delivery, ...]]:
        """Each set of holders → the messages that refresh copies of its units (backward masking).

        The set of all groups is absent, because no group needs copies of units that all groups
        hold. The holders in a set divide the receiving groups among themselves. If there are more
        holders than receivers, those with the most parameters to send so far do not send.

        If possible, a holder sends to the same groups for several sets, so that the messages of
        these sets share a communicator. If there would be more than ``WAYS`` communicators per
        group, the holder with the fewest parameters to send so far sends to all receivers.
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
            )  # holders that already send to groups without the units come first
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
        """Return warnings about unconnected groups, groups without units, or many communicators."""
        notes = []
        if not self.connected:
            one, other = (list_groups(groups) for groups in self.components()[:2])
            remedy = "raise sdp.capacity: at present, they have no room for a unit in common"
            if not self.can_be_connected:
                enough = math.ceil(100 * self.links_needed / (self.groups * len(self.units))) / 100
                remedy = (
                    f"units that connect all groups have at least {self.links_needed} holders together, and these have "
                    f"{self.links}; use sdp.capacity {enough:g} or more"
                )
            notes.append(
                f"groups {one} and groups {other} hold no unit in common, so they learn from each other only through "
                f"the layers that every group holds; {remedy}"
            )
        empty = np.flatnonzero(self._sums((1,) * len(self.units)) == 0).tolist()
        if empty:
            notes.append(f"groups {empty} hold no unit and train only the shared part")
        most = int(self._communicators.max())
        if most > 4 * COMMUNICATORS:
            notes.append(
                f'a rank takes part in {most} communicators; sdp.placement "balanced" keeps them near {COMMUNICATORS}'
            )
        return notes

    def guarantees(self) -> dict[str, Any]:
        """Return the guarantees of this placement as JSON, such as the fewest holders of a unit.

        Fractions are of the units' parameters. Work is in FLOPs if the model states them, else in
        parameters.
        """
        return {
            "fewest_holders": min(map(len, self.holders), default=0),
            "held_fractions": [self.held_fraction(group) for group in range(self.groups)],
            "connected_through_units": self.connected,
            "work": "flops" if self.flops else "parameters",
            "slowest_over_mean": self.imbalance,
            "communicators_per_rank": int(self._communicators.max()),
        }

    def describe(self) -> str:
        """Return a line for the log: units, holders, held fractions, balance and connectivity."""
        counts = [len(holders) for holders in self.holders]
        shown = ",".join(map(str, counts)) if len(counts) <= 32 else f"{min(counts)} to {max(counts)}"
        held = [self.held_fraction(group) for group in range(self.groups)]
        return (
            f"{len(self.units)} units over {self.groups} groups, k = {shown} (mean {np.mean(counts):.2f}); a group "
            f"holds {min(held):.0%} to {max(held):.0%} of the units' parameters; the slowest group has "
            f"{self.imbalance:.3f} × the mean {'FLOPs' if self.flops else 'parameters'}; connected through "
            f"units: {'yes' if self.connected else 'no'}; at most "
            f"{int(self._communicators.max())} communicators a rank"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        try:
            holders = tuple(tuple(int(group) for group in held) for held in data["holders"])
            costs, flops = (tuple(int(cost) for cost in values) for values in (data["costs"], data.get("flops", ())))
            return cls(int(data["groups"]), tuple(data["units"]), holders, costs, flops)
        except (KeyError, TypeError, ValueError) as error:
            raise PlacementError(f"placement: not a saved placement ({error!r})") from None


def list_groups(groups: Sequence[int]) -> str:
    """Return the groups as text for a message, at most eight of them."""
    return str(list(groups)) if len(groups) <= 8 else f"[{', '.join(map(str, groups[:8]))}, …]"


def _shared_out(
    sources: Sequence[int], receivers: Sequence[int], known: Mapping[int, Sequence[frozenset[int]]]
) -> list[tuple[int, frozenset[int]]]:
    """Divide ``receivers`` (sorted) among ``sources``, in lists of equal length, plus or minus one.

    If possible, a source gets a list that is ``known``: the source sends to these groups already.
    Otherwise it gets the next receivers in the ring. In a cyclic placement, these are the same for
    many holder sets.
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


# Buckets per unit. The first is sent while backward is still in the same block. While one bucket is
# summed, the network has another bucket to send.
BUCKETS = 4

# Limits of a bucket's size in float32. Smaller buckets are bound by latency, and larger ones cost
# memory.
LEAST_BYTES, MOST_BYTES = 2**19, 64 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters or slices whose gradients are averaged in one message, and their holders."""

    holders: Holders
    names: tuple[str, ...]


def plan_buckets(
    numels: Mapping[str, int],
    holders_of: Callable[[str], Holders],
    unit_of: Callable[[str], str],
    comes_last: Callable[[str], bool],
) -> list[Bucket]:
    """Divide the trainable parameters into buckets, in the order in which their averages start.

    Backward makes the gradient of the last parameter first, so the last parameter is in the first
    bucket. Neighbours of one unit share a bucket of at most 1 / ``BUCKETS`` of the unit's bytes.
    This limit is at least ``LEAST_BYTES`` and at most ``MOST_BYTES``. A parameter is never split.
    Every rank computes the same list, so all ranks start their averages in the same order.

    Args:
        numels: parameter name → number of elements, in the model's order.
        holders_of: returns the groups that hold a parameter.
        unit_of: returns the unit of a parameter.
        comes_last: whether a gradient is ready only at the end of backward, as with FSDP2 for
            parameters outside all wrapped modules. It is averaged last, so that no other average
            waits for it.
    """
    buckets: list[Bucket] = []
    size, last = 0, None
    of_unit: Counter[str] = Counter()
    for name, numel in numels.items():
        of_unit[unit_of(name)] += numel * 4
    backwards = list(numels)[::-1]
    for name in sorted(backwards, key=comes_last):  # stable
        nbytes = numels[name] * 4
        most = min(MOST_BYTES, max(LEAST_BYTES, -(-of_unit[unit_of(name)] // BUCKETS)))
        if last == unit_of(name) and size + nbytes <= most:
            buckets[-1] = Bucket(buckets[-1].holders, (name, *buckets[-1].names))
            size += nbytes
        else:
            buckets.append(Bucket(holders_of(name), (name,)))
            size, last = nbytes, unit_of(name)
    return buckets


@dataclass(frozen=True)
class Refresh(Delivery):
    """A message with new weights, from a holder of a unit to groups with frozen copies of the unit.

    ``names`` are the parameters of the unit, and ``block`` is the path of the unit's block.
    """

    block: str
    names: tuple[str, ...]
