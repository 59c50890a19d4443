"""Give units to groups that have room for them: a greedy filling, and exchanges that level, connect, shuffle or order it.

Everything is integers and stable sorts, and randomness is the raw output of PCG64, which NumPy keeps for ever: each rank computes
the placement by itself, and all must come to the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ..distributed.mesh import Holders

_NEVER = np.iinfo(np.int64).max
_LOOKED_AT = 1500  # edges on either side of an exchange that connects
_LIGHTEST = 16  # groups that may take over work from the slowest
_EXCHANGED_CELLS = 10_000_000  # groups × units × exchanges that level a filling, at most
_ROUNDS = 10  # of shuffling


@dataclass(frozen=True)
class Packing:
    """``room`` (groups,): parameters that each group may hold. Of the units: ``size`` parameters, ``work`` FLOPs or parameters, and
    ``wanted`` holders, at most so many. All int64. A filling is a boolean array ``held`` of shape (groups, units).
    """

    room: np.ndarray
    size: np.ndarray
    work: np.ndarray
    wanted: np.ndarray

    def left(self, held: np.ndarray) -> np.ndarray:
        """Parameters for which each group still has room."""
        return self.room - held @ self.size

    def loads(self, held: np.ndarray) -> np.ndarray:
        """Work of each group."""
        return held @ self.work

    def least_slowest(self, held: np.ndarray) -> int:
        """Work that the slowest group has at least, whoever holds what, with as many holders per unit as in ``held``.

        The linear relaxation: all groups share alike, but for those that are full before. Rounded up to what whole units can add up to.
        """
        total = int(held.sum(axis=0) @ self.work)
        if np.array_equal(self.size, self.work):
            room, groups = sorted(int(room) for room in self.room), len(self.room)
            while groups > 1 and room[-groups] * groups < total:  # the smallest group is full
                total -= room[-groups]
                groups -= 1
        else:
            groups = len(self.room)
        step = max(1, int(np.gcd.reduce(self.work)))
        return max(-(-total // (groups * step)) * step, int(self.work.max()))


def holders_of(held: np.ndarray) -> tuple[Holders, ...]:
    """For each unit (column of ``held``), the sorted groups that hold it."""
    return tuple(tuple(np.flatnonzero(column).tolist()) for column in held.T)


def fill(packing: Packing, *, in_rounds: bool, by_work: bool) -> np.ndarray:
    """Largest units first, each to the groups with the most room, or with the least work. What finds no room has fewer holders.

    ``in_rounds``: every unit's first holder comes before any unit's second.
    """
    groups, units = len(packing.room), len(packing.size)
    largest = np.lexsort((-packing.size, -packing.work) if by_work else (-packing.work, -packing.size)).tolist()
    steps = [(unit, int(packing.wanted[unit])) for unit in largest]
    if in_rounds:
        steps = [(unit, 1) for unit in largest] + [(unit, k - 1) for unit, k in steps if k > 1]
    held = np.zeros((groups, units), dtype=bool)
    room, load = packing.room.copy(), np.zeros(groups, dtype=np.int64)
    for unit, k in steps:
        fits = np.flatnonzero((room >= packing.size[unit]) & ~held[:, unit])
        keys = (-room[fits], load[fits]) if by_work else (load[fits], -room[fits])
        chosen = fits[np.lexsort(keys)[:k]]
        held[chosen, unit] = True
        room[chosen] -= packing.size[unit]
        load[chosen] += packing.work[unit]
    return held


def level(packing: Packing, held: np.ndarray) -> np.ndarray:
    """Move or exchange units between the slowest group and the lightest ones as long as that makes the pair's slower one faster."""
    held, enough = held.copy(), packing.least_slowest(held)
    for _ in range(min(8 * len(packing.room), 1 + _EXCHANGED_CELLS // held.size)):
        load, left = packing.loads(held), packing.left(held)
        slow = int(load.argmax())
        best = (int(load[slow]), -1, -1, -1)
        for other in np.argsort(load, kind="stable")[:_LIGHTEST].tolist():
            gives, takes = _differences(held, slow, other)
            work, size = _exchanged(packing.work, gives, takes), _exchanged(packing.size, gives, takes)
            after = np.maximum(load[slow] - work, load[other] + work)
            after[(size > left[other]) | (-size > left[slow])] = _NEVER
            if after.size:
                at = int(after.argmin())
                best = min(
                    best, (int(after.flat[at]), other, int(gives[at // len(takes)]), int(takes[at % len(takes)]))
                )
        if load[slow] <= enough or best[1] < 0:
            break
        _exchange(held, slow, *best[1:])
    return held


def _differences(held: np.ndarray, one: int, other: int) -> tuple[np.ndarray, np.ndarray]:
    """Units of ``one`` that ``other`` has not, and the reverse, with −1 for none."""
    return np.flatnonzero(held[one] & ~held[other]), np.append(np.flatnonzero(held[other] & ~held[one]), -1)


def _exchanged(values: np.ndarray, gives: np.ndarray, takes: np.ndarray) -> np.ndarray:
    """Net amount given, shape (gives, takes)."""
    return values[gives][:, None] - np.where(takes >= 0, values[takes], 0)[None, :]


def _exchange(held: np.ndarray, one: int, other: int, given: int, taken: int) -> None:
    held[one, given], held[other, given] = False, True
    if taken >= 0:
        held[one, taken], held[other, taken] = True, False


def connect(packing: Packing, held: np.ndarray) -> np.ndarray:
    """Connect the groups through units by as few exchanges as there are parts to join, keeping every unit's number of holders.

    An edge (group, unit) that closes a cycle can be moved to another part of the graph without cutting its own, and what comes back
    for it stays tied to both. Σk ≥ groups + units − 1 leaves such an edge until there is one part; rooms may forbid every exchange.
    """
    held = held.copy()
    if held.sum() < sum(held.shape) - 1:
        return held
    while True:
        parts, part_of, spare = _components(held)
        if parts == 1:
            return held
        found = _joining_exchange(packing, held, part_of, spare)
        if found is None:
            return held
        _exchange(held, *found)


def _components(held: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Number of parts of the graph, the part of every group, and the edges (n, 2) that a spanning forest does not need."""
    groups, units = held.shape
    edges = sparse.csr_array(held.astype(np.int8))
    graph = sparse.block_array([[None, edges], [edges.T, None]], format="csr")
    parts, labels = csgraph.connected_components(graph, directed=False)
    forest = csgraph.minimum_spanning_tree(sparse.triu(graph, format="csr"))
    rows, columns = forest.nonzero()
    needed = np.zeros((groups, units), dtype=bool)
    needed[rows, columns - groups] = True
    return parts, labels[:groups], np.argwhere(held & ~needed)


def _joining_exchange(
    packing: Packing, held: np.ndarray, part_of: np.ndarray, spare: np.ndarray
) -> tuple[int, int, int, int] | None:
    """Of the exchanges between two parts that fit, the one after which the slower group of the two is fastest."""
    load, left = packing.loads(held), packing.left(held)
    spare = spare[:_LOOKED_AT]
    # A group's units, and −1: something is given for nothing. Of every part some, so that no part is out of sight.
    partners = np.vstack([np.column_stack((np.arange(len(held)), np.full(len(held), -1))), np.argwhere(held)])
    partners = np.vstack(
        [
            partners[part_of[partners[:, 0]] == part][:_LOOKED_AT]
            for part in (part_of[spare[0, 0]], *_others(part_of, spare))
        ]
    )
    (one, gives), (other, takes) = spare.T, partners.T
    work, size = _exchanged(packing.work, gives, takes), _exchanged(packing.size, gives, takes)
    after = np.maximum(load[one][:, None] - work, load[other][None, :] + work)
    after[
        (size > left[other][None, :])
        | (-size > left[one][:, None])
        | (part_of[one][:, None] == part_of[other][None, :])
    ] = _NEVER
    at = int(after.argmin())
    if after.flat[at] == _NEVER:
        return None
    row, column = divmod(at, len(partners))
    return int(one[row]), int(other[column]), int(gives[row]), int(takes[column])


def _others(part_of: np.ndarray, spare: np.ndarray) -> list[int]:
    return [part for part in np.unique(part_of)[:64].tolist() if part != part_of[spare[0, 0]]]


def shuffle(packing: Packing, held: np.ndarray, seed: int, slowest: int = _NEVER) -> np.ndarray:
    """Shuffle who holds what; every unit keeps its number of holders and every group its number of units.

    Pairs of groups shuffle the units that one of them has and split them again as before, unless that overflows a group's room or
    gives it more than ``slowest`` work. (The "curveball" walk over matrices of given margins: Strona et al. 2014, Nature Comm. 5:4114.)
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


def in_step(packing: Packing, held: np.ndarray, bundles: Sequence[Sequence[int]], work: Sequence[int]) -> np.ndarray:
    """Exchange holders among equal units so that a unit's holders come to it together in backward, as nearly as is found.

    Under forward masking a group skips what it does not hold: a holder with fewer units behind it has the gradient earlier, and its
    reduction waits for the others'. So from the last unit on each gets, of the holders of units like it, those with the least work
    behind them. ``bundles[b]``: the units, in the model's order, whose holders are column ``b`` of ``held``; ``work`` (units,).
    Nothing else that a placement promises changes: equal units have equal size, work, holders in number and copies.
    """
    of_bundle = {unit: bundle for bundle, units in enumerate(bundles) for unit in units}
    backwards = sorted(of_bundle, reverse=True)
    scale = max(
        1, math.gcd(*(work[unit] for unit in backwards))
    )  # FLOPs of many units and groups would not fit 64 bits
    work = [value // scale for value in work]
    counts = held.sum(axis=0)
    kinds = np.column_stack((packing.size, packing.work, packing.wanted, counts, [len(units) for units in bundles]))
    kind_of = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    unused: list[tuple[np.ndarray, np.ndarray]] = []  # by kind: members (sets, k), and how many units have them
    for kind in range(kind_of.max() + 1):
        sets, copies = np.unique(held[:, kind_of == kind].T, axis=0, return_counts=True)
        unused.append((np.nonzero(sets)[1].reshape(len(sets), -1), copies))
    ordered, chosen = np.zeros_like(held), set[int]()
    behind = np.zeros(len(held), dtype=np.int64)
    for unit in backwards:
        bundle = of_bundle[unit]
        if bundle not in chosen:
            members, copies = unused[kind_of[bundle]]
            left = np.flatnonzero(copies)
            done = behind[members[left]]
            best = left[np.lexsort((done.max(axis=1), done.sum(axis=1)))[0]]
            copies[best] -= 1
            ordered[members[best], bundle] = True
            chosen.add(bundle)
        behind[ordered[:, bundle]] += work[unit]
    return min(held, ordered, key=lambda filling: _waiting(filling, backwards, of_bundle, work))


def _waiting(held: np.ndarray, backwards: Sequence[int], of_bundle: Mapping[int, int], work: Sequence[int]) -> int:
    """Work that the last holder of a unit still has to do when another has its gradient, added up over units and holders."""
    behind, waiting = np.zeros(len(held), dtype=np.int64), 0
    for unit in backwards:
        members = held[:, of_bundle[unit]]
        behind[members] += work[unit]
        waiting += int((behind[members].max() - behind[members]).sum())
    return waiting
