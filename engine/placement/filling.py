"""Fill groups with units, for the random and the balanced placement.

Every rank computes the placement by itself. So nothing here may depend on the time, on hashes of
strings or on the order of a set.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse

from ..config.schema import SDPSection
from ..distributed.mesh import Holders
from ..errors import PlacementError
from .connectivity import spectral_gap
from .in_step import in_step
from .packing import Packing, connect, fill, holders_of, level, shuffle
from .placement import COMMUNICATORS
from .profiles import capacities, listed_counts, shaped_counts

_EXACT = 256  # groups × units up to which integer programming takes seconds at most
_CLOSE = 1.002  # slowest group / its lower bound: a smaller ratio is not worth a search
_CANDIDATES = 32  # shuffles among which the spectral gap decides; fewer if they are large
_CANDIDATE_CELLS = 500_000  # groups × units of all candidates together


def pack(
    section: SDPSection, names: Sequence[str], costs: Sequence[int], work: Sequence[int], protected: set[int]
) -> tuple[tuple[Holders, ...], int]:
    """Choose the holders of every unit.

    Args:
        section: the section ``sdp`` of the configuration.
        names: the names of the units.
        costs: the number of parameters of each unit.
        work: FLOPs, else parameters, of each unit.
        protected: indices of the units that every group holds.

    Returns:
        The holders of every unit, and a lower bound on the work of the slowest group (0: unknown).

    Raises:
        ConfigError: the capacity or the profile is not valid.
        PlacementError: the groups do not have enough room.
    """
    room_for = capacities(section)
    free = [unit for unit in range(len(costs)) if unit not in protected]
    holders: list[Holders] = [tuple(range(section.groups))] * len(costs)
    listed = listed_counts(section, len(costs), protected)
    if not free:
        return tuple(holders), 0
    bundles = _bundles(
        section, free, costs, work, None if listed is None else [listed[unit] for unit in free], max(room_for)
    )
    packing, held, bound = _fill_best(
        _packings(section, bundles, costs, work, room_for, listed), balance=section.placement == "balanced"
    )
    _require_room(packing, held, section, [names[bundle[0]] for bundle in bundles], room_for)
    if section.placement == "random":
        held = connect(packing, shuffle(packing, held, section.seed))
    else:
        held = _best_connected(packing, held, [len(bundle) for bundle in bundles])
        held = in_step(packing, held, bundles, work)
    for bundle, members in zip(bundles, holders_of(held), strict=True):
        for unit in bundle:
            holders[unit] = members
    always = sum(work[unit] for unit in protected)
    return tuple(holders), bound + always if bound else 0


def _bundles(
    section: SDPSection,
    free: Sequence[int],
    costs: Sequence[int],
    work: Sequence[int],
    listed: Sequence[int] | None,
    largest: float,
) -> list[list[int]]:
    """Bundle units that share their holders, into bundles of about equal cost.

    There are so few bundles that a rank takes part in about ``COMMUNICATORS`` holder sets. A listed
    profile bundles units with equal k. A profile that falls with depth bundles neighbours. Any
    other profile deals the largest units first.
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
    """Deal units to bundles: the heaviest unit first, each to the lightest bundle.

    Among equally light bundles, the one with the fewest units gets it, then the first.
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
    """Yield the packing that is asked for, then packings that want fewer holders for all units.

    Fewer holders for all units are better than too few for the units that are placed last.
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


def _fill_best(packings: Iterator[Packing], *, balance: bool) -> tuple[Packing, np.ndarray, int]:
    """Return the first packing whose units all find as many holders as wanted.

    If no packing does, return the first one. In small cases the first one is always used, because
    integer programming finds its best filling.
    """
    first = None
    for packing in packings:
        held, bound = _filling(packing, balance=balance)
        first = first or (packing, held, bound)
        if held.size <= _EXACT or (held.sum(axis=0) == packing.wanted).all():
            return packing, held, bound
    assert first is not None
    return first


def _filling(packing: Packing, *, balance: bool) -> tuple[np.ndarray, int]:
    """Return the best filling, and a lower bound on the work of its slowest group.

    The best filling covers every unit, then lacks the fewest of the wanted holders. For ``balance``
    it then has the fastest slowest group. Greedy fillings are tried first. Integer programming
    follows if they are not good enough and the case is small.
    """
    bound = 0

    def badness(held: np.ndarray) -> tuple[int, int, int]:
        counts = held.sum(axis=0)
        return (
            int((counts == 0).sum()),
            int((packing.wanted - counts).sum()),
            int(packing.loads(held).max()) if balance else 0,
        )

    def good_enough(held: np.ndarray) -> bool:
        return badness(held)[:2] == (0, 0) and badness(held)[2] <= _CLOSE * packing.least_slowest(held)

    best: np.ndarray | None = None
    for in_rounds in (False, True):
        for by_work in (False, True) if balance else (False,):
            held = fill(packing, in_rounds=in_rounds, by_work=by_work)
            held = level(packing, held) if balance else held
            if best is None or badness(held) < badness(best):
                best = held
            if good_enough(best):
                return best, packing.least_slowest(best)
    assert best is not None
    covers = badness(best)[0] == 0
    if best.size <= _EXACT:
        # SciPy's solvers take 0.4 s to import, and most runs do not need them.
        from .integer_program import optimum

        found = optimum(packing, int(best.sum()) if covers else len(packing.size))
        if found is not None:
            best = min(best, found[0], key=badness)
            bound = found[1] if best.sum() == found[0].sum() else 0
    return best, max(bound, packing.least_slowest(best))


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
    asked = (
        f"for all {needed[unit]} holders of {names[unit]!r}" if needed[unit] > 1 else f"to hold {names[unit]!r} at all"
    )
    share = packing.size[unit] / max(1, packing.size.sum())
    raise PlacementError(
        f"sdp.capacity: the groups have no room {asked} next to the other units ({share:.1%} of the units' "
        f"parameters); {_capacity_that_fits(packing, needed, room_for)} would do, or cut the model into smaller units "
        '(sdp.granularity "neuron"), or let all groups hold it (sdp.protect)'
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


def _best_connected(packing: Packing, held: np.ndarray, copies: Sequence[int]) -> np.ndarray:
    """Choose the filling or one of its shuffles. The slowest group of the result is not slower than
    the filling's.

    Connected candidates come first, then those with the fastest slowest group, then those with the
    largest spectral gap. The gap is compared to six digits, so that rounding on another machine
    cannot change the choice.
    """
    slowest = int(packing.loads(held).max())

    def badness(candidate: np.ndarray) -> tuple[bool, int, float]:
        gap = spectral_gap(sparse.csr_array(candidate.astype(float)), copies)
        return gap < 1e-9, int(packing.loads(candidate).max()), -round(gap, 6)

    count = max(2, min(_CANDIDATES, _CANDIDATE_CELLS // held.size))
    candidates = [held, *(shuffle(packing, held, seed, slowest) for seed in range(count))]
    return min((connect(packing, candidate) for candidate in candidates), key=badness)
