"""Chooses the holders of units within the groups' capacities ("balanced" and "random" placement).

Every rank computes the placement by itself, and all ranks must get the same result. So all values
are integers, all sorts are stable, and nothing depends on the time, on hashes of strings or on the
order of a set. Randomness is the raw output of PCG64, which NumPy guarantees never to change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..config.schema import SDPSection
from ..distributed.mesh import Holders
from ..errors import PlacementError
from .placement import COMMUNICATORS
from .profiles import capacities, listed_counts, shaped_counts

_NEVER = np.iinfo(np.int64).max
_LOOKED_AT = 1500  # edges per side in the search for an exchange that connects groups
_LIGHTEST = 16  # number of lightest groups that may take over work from the slowest group
_EXCHANGED_CELLS = 10_000_000  # limit of groups × units × exchanges in the search for an equal load
_ROUNDS = 10  # rounds of shuffling


@dataclass(frozen=True)
class Packing:
    """The task of assigning units to groups: how much fits into a group, and what a unit needs.

    A solution is a *filling*: a boolean array ``held`` of shape (groups, units), True where the
    group holds the unit. The arrays of the task are int64.

    Attributes:
        room: the most parameters that each group may hold, shape (groups,).
        size: number of parameters of each unit, shape (units,).
        work: FLOPs of each unit, or parameters if the model states no FLOPs, shape (units,).
        wanted: the largest number of holders of each unit, shape (units,).
    """

    room: np.ndarray
    size: np.ndarray
    work: np.ndarray
    wanted: np.ndarray

    def left(self, held: np.ndarray) -> np.ndarray:
        """Return how many parameters still fit into each group, besides its units in ``held``."""
        return self.room - held @ self.size

    def loads(self, held: np.ndarray) -> np.ndarray:
        """Return the work of each group, shape (groups,). ``held`` has the units of each group."""
        return held @ self.work


def pack(
    section: SDPSection, names: Sequence[str], costs: Sequence[int], work: Sequence[int], protected: set[int]
) -> tuple[Holders, ...]:
    """Choose the holders of every unit for ``sdp.placement`` "balanced" or "random".

    Args:
        section: the section ``sdp`` of the configuration.
        names: the names of the units.
        costs: the number of parameters of each unit.
        work: FLOPs of each unit, or parameters if the model states no FLOPs.
        protected: indices of the units that every group holds.

    Raises:
        ConfigError: the capacity or the profile is not valid.
        PlacementError: the groups do not have enough room.
    """
    room_for = capacities(section)
    free = [unit for unit in range(len(costs)) if unit not in protected]
    holders: list[Holders] = [tuple(range(section.groups))] * len(costs)
    listed = listed_counts(section, len(costs), protected)
    if not free:
        return tuple(holders)
    bundles = _bundles(
        section, free, costs, work, None if listed is None else [listed[unit] for unit in free], max(room_for)
    )
    balance = section.placement == "balanced"
    fillings = []
    for packing in _packings(section, bundles, costs, work, room_for, listed):
        fillings.append((packing, _filling(packing, balance=balance)))
        if (fillings[-1][1].sum(axis=0) == packing.wanted).all():
            break
    else:  # no packing gives all units as many holders as it wants
        fillings.append(fillings[0])
    packing, held = fillings[-1]
    _require_room(packing, held, section, [names[bundle[0]] for bundle in bundles], room_for)
    held = connect(packing, held if balance else shuffle(packing, held, section.seed))
    for bundle, members in zip(bundles, holders_of(held), strict=True):
        for unit in bundle:
            holders[unit] = members
    return tuple(holders)


def _bundles(
    section: SDPSection,
    free: Sequence[int],
    costs: Sequence[int],
    work: Sequence[int],
    listed: Sequence[int] | None,
    largest: float,
) -> list[list[int]]:
    """Put units into bundles of about equal cost. The units of a bundle get the same holders.

    The number of bundles is so small that a rank is in about ``COMMUNICATORS`` holder sets. A
    listed profile bundles units with equal k, and a profile that falls with depth bundles
    neighbours. Otherwise, the largest units are distributed first.
    """
    wanted = min(len(free), max(1, round(COMMUNICATORS / largest)))
    if len(free) == wanted or 2 ** (section.groups - 1) <= COMMUNICATORS:
        return [[unit] for unit in free]
    total = [max(1, sum(values[unit] for unit in free)) for values in (costs, work)]
    weight = {unit: costs[unit] * total[1] + work[unit] * total[0] for unit in free}
    if listed is None and section.profile == "uniform":
        return _dealt(free, weight, wanted)
    if listed is not None:
        classes = {
            k: [unit for unit, other in zip(free, listed, strict=True) if other == k] for k in sorted(set(listed))
        }
        return sorted(
            b for units in classes.values() for b in _dealt(units, weight, max(1, wanted * len(units) // len(free)))
        )
    bundles: list[list[int]] = [[] for _ in range(wanted)]
    before, everything = 0, max(1, sum(weight.values()))
    for unit in free:
        bundles[min(wanted - 1, (2 * before + weight[unit]) * wanted // (2 * everything))].append(unit)
        before += weight[unit]
    return [bundle for bundle in bundles if bundle]


def _dealt(units: Sequence[int], weight: dict[int, int], bundles: int) -> list[list[int]]:
    """Assign units to bundles: the heaviest unit first, each to the lightest bundle.

    Of equally light bundles, the one with the fewest units gets the unit, then the first bundle.
    """
    made: list[list[int]] = [[] for _ in range(bundles)]
    lightest = [(0, 0, index) for index in range(bundles)]
    for unit in sorted(units, key=lambda unit: (-weight[unit], unit)):
        total, count, index = lightest[0]
        made[index].append(unit)
        heapq.heapreplace(lightest, (total + weight[unit], count + 1, index))
    return sorted(sorted(bundle) for bundle in made)


def _packings(
    section: SDPSection,
    bundles: Sequence[Sequence[int]],
    costs: Sequence[int],
    work: Sequence[int],
    room_for: Sequence[float],
    listed: Sequence[int] | None,
) -> Iterator[Packing]:
    """Yield the requested packing, then packings with fewer holders for all units.

    If there is too little room, these are better than too few holders for the units that are placed
    last.
    """
    sizes = [sum(costs[unit] for unit in bundle) for bundle in bundles]
    works = [sum(work[unit] for unit in bundle) for bundle in bundles]
    mean = sum(room_for)
    if len(set(sizes)) == 1:  # the capacity that whole units can fill
        mean = sum(math.floor(capacity * len(sizes) + 1e-9) for capacity in room_for) / len(sizes)
    for percent in (100, 99, 98, 97, 96, 95, 93, 90, 85) if listed is None else (100,):
        counts = (
            [listed[bundle[0]] for bundle in bundles]
            if listed
            else shaped_counts(section, max(1.0, mean * percent / 100), sizes)
        )
        yield Packing(
            _rooms(room_for, sum(sizes)), *(np.array(values, dtype=np.int64) for values in (sizes, works, counts))
        )


def _rooms(room_for: Sequence[float], total: int) -> np.ndarray:
    return np.array([math.floor(capacity * total + 1e-9 * total) for capacity in room_for], dtype=np.int64)


def _filling(packing: Packing, *, balance: bool) -> np.ndarray:
    """Return the best of the greedy fillings.

    The criteria, in this order: every unit has a holder; the fewest of the wanted holders are
    missing; with ``balance``, the slowest group has the least work.
    """

    def badness(held: np.ndarray) -> tuple[int, int, int]:
        counts = held.sum(axis=0)
        slowest = int(packing.loads(held).max()) if balance else 0
        return int((counts == 0).sum()), int((packing.wanted - counts).sum()), slowest

    def fillings(*, in_rounds: bool) -> list[np.ndarray]:
        by_works = (False, True) if balance else (False,)
        made = [fill(packing, in_rounds=in_rounds, by_work=by_work, balance=balance) for by_work in by_works]
        return [_level(packing, held) for held in made] if balance else made

    best = min(fillings(in_rounds=False), key=badness)
    return best if badness(best)[:2] == (0, 0) else min(best, *fillings(in_rounds=True), key=badness)


def _require_room(
    packing: Packing, held: np.ndarray, section: SDPSection, names: Sequence[str], room_for: Sequence[float]
) -> None:
    """Check that every unit has a holder, and as many as a listed profile says.

    Raises:
        PlacementError: a unit has too few holders.
    """
    listed = isinstance(section.profile, list)
    needed = packing.wanted if listed else np.ones_like(packing.wanted)
    short = np.flatnonzero(held.sum(axis=0) < needed)
    if not len(short):
        return
    unit = int(short[0])
    asked = f"for it in {needed[unit]} groups" if needed[unit] > 1 else "for it"
    share = packing.size[unit] / max(1, packing.size.sum())
    raise PlacementError(
        f"sdp.capacity: {names[unit]!r} has {share:.1%} of the units' parameters, and next to the other units the "
        f"groups have no room {asked}; use {_capacity_that_fits(packing, needed, room_for)}, or cut the model into "
        'smaller units (sdp.granularity "neuron"), or let all groups hold this unit (sdp.protect)'
    )


def _capacity_that_fits(packing: Packing, needed: np.ndarray, room_for: Sequence[float]) -> str:
    """Return the lowest capacity with which a greedy filling succeeds, in steps of two percent."""
    larger = list(room_for)
    while min(larger) < 1:
        larger = [min(1.0, math.ceil(1020 * capacity) / 1000) for capacity in larger]
        roomy = Packing(_rooms(larger, int(packing.size.sum())), packing.size, packing.work, packing.wanted)
        if any((fill(roomy, in_rounds=rounds, by_work=False).sum(axis=0) >= needed).all() for rounds in (False, True)):
            break
    return f"{larger[0]:g}" if len(set(larger)) == 1 else str([float(f"{capacity:g}") for capacity in larger])


def holders_of(held: np.ndarray) -> tuple[Holders, ...]:
    """Return the sorted groups that hold each unit. ``held`` has the shape (groups, units)."""
    return tuple(tuple(np.flatnonzero(column).tolist()) for column in held.T)


def fill(packing: Packing, *, in_rounds: bool, by_work: bool, balance: bool = False) -> np.ndarray:
    """Assign units to groups one after the other, the largest units first.

    Each holder of a unit is the group with the most room left, or the group with the least work. A
    unit gets fewer holders than it wants if too few groups have room for it.

    Args:
        packing: the room of the groups and the demands of the units.
        in_rounds: whether every unit gets its first holder before any unit gets its second.
        by_work: whether the group with the least work is chosen. Of groups with equal work, the one
            with the most room is chosen.
        balance: whether two further rules decide ties. Of equally large units, the last one in the
            model is assigned first, so that its holders compute its gradient at about the same
            time. Of groups that fit equally well, the one that shares the fewest units with the
            unit's holders is chosen, so that units connect more groups.
    """
    groups, units = len(packing.room), len(packing.size)
    tie = -np.arange(units) if balance else np.arange(units)
    keys = (packing.size, packing.work) if by_work else (packing.work, packing.size)
    largest = np.lexsort((tie, -keys[0], -keys[1])).tolist()
    steps = [(unit, int(packing.wanted[unit])) for unit in largest]
    if in_rounds:
        steps = [(unit, 1) for unit in largest] + [(unit, k - 1) for unit, k in steps if k > 1]
    held = np.zeros((groups, units), dtype=bool)
    room, load = packing.room.copy(), np.zeros(groups, dtype=np.int64)
    shared = np.zeros((groups, groups), dtype=np.int64)  # the number of units that two groups share
    for unit, k in steps:
        holders = np.flatnonzero(held[:, unit]).tolist()
        common = shared[holders].sum(axis=0)
        for _ in range(k):
            fits = np.flatnonzero((room >= packing.size[unit]) & ~held[:, unit])
            if not len(fits):
                break
            keys = (-room[fits], load[fits]) if by_work else (load[fits], -room[fits])
            group = int(fits[np.lexsort((common[fits], *keys))[0]])
            held[group, unit] = True
            room[group] -= packing.size[unit]
            load[group] += packing.work[unit]
            if balance:
                shared[group, holders] += 1
                shared[holders, group] += 1
                holders.append(group)
                common += shared[group]
    return held


def _level(packing: Packing, held: np.ndarray) -> np.ndarray:
    """Exchange units between the slowest group and light groups, while the slowest gets faster."""
    held, groups = held.copy(), np.arange(len(held))
    for _ in range(min(8 * len(groups), 1 + _EXCHANGED_CELLS // held.size)):
        load = packing.loads(held)
        slow, light = int(load.argmax()), np.argsort(load, kind="stable")[:_LIGHTEST]
        given = np.argwhere(held & (groups == slow)[:, None])
        partners = _partners(held, np.isin(groups, light))
        has = np.column_stack((held, np.zeros(len(held), dtype=bool)))  # no group has the unit −1
        forbidden = has[partners[:, 0]][:, given[:, 1]].T | has[slow, partners[:, 1]][None, :]
        found = _best_exchange(packing, held, given, partners, forbidden)
        if found is None or found[0] >= load[slow]:
            break
        _exchange(held, *found[1:])
    return held


def connect(packing: Packing, held: np.ndarray) -> np.ndarray:
    """Exchange units between groups until units connect all groups, and return the new ``held``.

    Every unit keeps its number of holders k. In the graph of groups and units, an exchange moves an
    edge (group, unit) that lies on a cycle to another connected component. The old component stays
    connected. While the graph is not connected and Σk ≥ groups + units − 1, there is such an edge.
    The result is not connected if Σk is smaller, or if the groups' room forbids every exchange.
    """
    held = held.copy()
    if held.sum() < sum(held.shape) - 1:
        return held
    while True:
        parts, part_of, spare = _components(held)
        if parts == 1:
            return held
        spare, partners = spare[:_LOOKED_AT], _partners(held, np.ones(len(held), dtype=bool))
        # Each component contributes some partners, so that no component is left out.
        first = part_of[spare[0, 0]]
        order = [first, *(part for part in range(min(parts, 64)) if part != first)]
        partners = np.vstack([partners[part_of[partners[:, 0]] == part][:_LOOKED_AT] for part in order])
        same_part = part_of[spare[:, 0]][:, None] == part_of[partners[:, 0]][None, :]
        found = _best_exchange(packing, held, spare, partners, same_part)
        if found is None:
            return held
        _exchange(held, *found[1:])


def _partners(held: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the pairs (group, unit) that can come back in an exchange, shape (n, 2).

    Pairs (group, −1) come first: such a group gets a unit and gives none.

    Args:
        held: the filling.
        groups: whether a group may take part, shape (groups,).
    """
    nothing = np.flatnonzero(groups)
    return np.vstack([np.column_stack((nothing, np.full(len(nothing), -1))), np.argwhere(held & groups[:, None])])


def _best_exchange(
    packing: Packing, held: np.ndarray, given: np.ndarray, taken: np.ndarray, forbidden: np.ndarray
) -> tuple[int, int, int, int, int] | None:
    """Find the exchange that fits and leaves the least work for the slower of the two groups.

    Args:
        packing: the room of the groups and the demands of the units.
        held: the filling.
        given: the pairs (group, unit) that can be given away, shape (n, 2).
        taken: the pairs (group, unit) that can come back, shape (m, 2). The unit −1 is none.
        forbidden: whether an exchange is excluded, shape (n, m).

    Returns:
        The work of the slower group, the two groups, and the units that each of them gives.
    """
    load, left = packing.loads(held), packing.left(held)
    (one, gives), (other, takes) = given.T, taken.T
    work, size = (
        values[gives][:, None] - np.where(takes >= 0, values[takes], 0)[None, :]
        for values in (packing.work, packing.size)
    )
    after = np.maximum(load[one][:, None] - work, load[other][None, :] + work)
    after[(size > left[other][None, :]) | (-size > left[one][:, None]) | forbidden] = _NEVER
    at = int(after.argmin()) if after.size else 0
    if not after.size or after.flat[at] == _NEVER:
        return None
    row, column = divmod(at, len(taken))
    return int(after.flat[at]), int(one[row]), int(other[column]), int(gives[row]), int(takes[column])


def _exchange(held: np.ndarray, one: int, other: int, given: int, taken: int) -> None:
    held[one, given], held[other, given] = False, True
    if taken >= 0:
        held[one, taken], held[other, taken] = True, False


def _components(held: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Find the connected components of the group–unit graph.

    Returns:
        The number of components, the component of every group, and the edges (n, 2) that a spanning
        forest does not need.
    """
    groups, units = held.shape
    spare = held.copy()
    last = np.full(units, -1)  # the component of each unit: the last group that joined it
    for group in range(groups):
        members = np.flatnonzero(held[group])
        parts, first = np.unique(last[members], return_index=True)
        spare[group, members[first]] = False
        spare[group, members[last[members] < 0]] = False
        last[np.isin(last, parts[parts >= 0])] = group
        last[members] = group
    ends = [int(last[np.argmax(row)]) if row.any() else -1 - group for group, row in enumerate(held)]
    numbers = {end: number for number, end in enumerate(dict.fromkeys(ends))}
    return len(numbers), np.array([numbers[end] for end in ends]), np.argwhere(spare)


def shuffle(packing: Packing, held: np.ndarray, seed: int, slowest: int = _NEVER) -> np.ndarray:
    """Shuffle at random which groups hold which units, and return the new ``held``.

    Every unit keeps its number of holders, and every group keeps its number of units. Two groups at
    a time collect the units that only one of the two holds, and redistribute these units at random.
    They keep their old units if a group would exceed its room or get more than ``slowest`` work.
    ``seed`` is the seed of PCG64.

    This is the "curveball" walk (Strona et al. 2014, Nature Comm. 5:4114), which shuffles a 0/1
    matrix and keeps the sums of its rows and columns.
    """
    held, bits, groups = held.copy(), np.random.PCG64(seed), len(held)
    left, load = packing.left(held), packing.loads(held)
    for _ in range(_ROUNDS):
        order = np.argsort(bits.random_raw(groups), kind="stable")
        for one, other in order[: groups // 2 * 2].reshape(-1, 2).tolist():
            mine, theirs = np.flatnonzero(held[one] & ~held[other]), np.flatnonzero(held[other] & ~held[one])
            if not len(mine) or not len(theirs):
                continue
            both = np.concatenate((mine, theirs))
            both = both[np.argsort(bits.random_raw(len(both)), kind="stable")]
            kept, given = both[: len(mine)], both[len(mine) :]
            size = int(packing.size[kept].sum() - packing.size[mine].sum())
            work = int(packing.work[kept].sum() - packing.work[mine].sum())
            if (
                size <= left[one]
                and -size <= left[other]
                and load[one] + work <= slowest
                and load[other] - work <= slowest
            ):
                held[one, both], held[other, both] = False, False
                held[one, kept], held[other, given] = True, True
                left[one], left[other] = left[one] - size, left[other] + size
                load[one], load[other] = load[one] + work, load[other] - work
    return held
