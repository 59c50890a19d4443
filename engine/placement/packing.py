"""Give units to groups that have room: fill greedily, then level, connect, shuffle or order.

Each rank computes the placement by itself, and all ranks must get the same result. So all values
are integers and all sorts are stable. Randomness is the raw output of PCG64, which NumPy guarantees
never to change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ..distributed.mesh import Holders

_NEVER = np.iinfo(np.int64).max
_LOOKED_AT = 1500  # edges on either side that the search for a connecting exchange looks at
_LIGHTEST = 16  # number of lightest groups that may take over work from the slowest group
_EXCHANGED_CELLS = 10_000_000  # limit of groups × units × exchanges when a filling is levelled
_ROUNDS = 10  # rounds of shuffling


@dataclass(frozen=True)
class Packing:
    """The room of the groups and the demands of the units. All arrays are int64.

    A filling is a boolean array ``held`` of shape (groups, units).

    Attributes:
        room: parameters that each group may hold, shape (groups,).
        size: parameters of each unit, shape (units,).
        work: FLOPs or parameters of each unit, shape (units,).
        wanted: the largest number of holders of each unit, shape (units,).
    """

    room: np.ndarray
    size: np.ndarray
    work: np.ndarray
    wanted: np.ndarray

    def left(self, held: np.ndarray) -> np.ndarray:
        """Return the number of parameters for which each group still has room."""
        return self.room - held @ self.size

    def loads(self, held: np.ndarray) -> np.ndarray:
        """Return the work of each group."""
        return held @ self.work

    def least_slowest(self, held: np.ndarray) -> int:
        """Return a lower bound on the work of the slowest group.

        The bound is valid for every filling with as many holders per unit as ``held``. It is a
        linear relaxation: all groups do equal work, except those that are full earlier. It is
        rounded up to a value that whole units can add up to.
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
    """Give units to groups, the largest units first.

    Each unit goes to the groups with the most room, or with the least work if ``by_work``. A unit
    that finds no room gets fewer holders.

    Args:
        packing: the room of the groups and the demands of the units.
        in_rounds: every unit gets its first holder before any unit gets its second.
        by_work: whether work decides first, and room among groups with equal work.
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
    """Exchange units between the slowest group and the lightest groups until that no longer helps.

    A unit may also move without one in return. An exchange helps if it makes the slower group of
    the pair faster.
    """
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
    """Return two arrays: the units that only ``one`` has, and the units that only ``other`` has,
    ended by −1.
    """
    return np.flatnonzero(held[one] & ~held[other]), np.append(np.flatnonzero(held[other] & ~held[one]), -1)


def _exchanged(values: np.ndarray, gives: np.ndarray, takes: np.ndarray) -> np.ndarray:
    """Return the net amount that each exchange gives away, shape (gives, takes)."""
    return values[gives][:, None] - np.where(takes >= 0, values[takes], 0)[None, :]


def _exchange(held: np.ndarray, one: int, other: int, given: int, taken: int) -> None:
    held[one, given], held[other, given] = False, True
    if taken >= 0:
        held[one, taken], held[other, taken] = True, False


def connect(packing: Packing, held: np.ndarray) -> np.ndarray:
    """Connect the groups through units, and keep the number of holders of every unit.

    One exchange joins two parts of the graph. An edge (group, unit) that closes a cycle can move to
    another part without splitting its own. The edge that comes back in exchange stays connected to
    both parts. While there are several parts, Σk ≥ groups + units − 1 ensures that such an edge
    exists. The groups' room may still forbid every exchange.
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
    """Find the connected parts of the group–unit graph.

    Returns:
        The number of parts, the part of every group, and the edges (n, 2) that a spanning forest
            does not need.
    """
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
    """Find the exchange between two parts that fits, and after which the slower of the two groups
    is fastest.
    """
    load, left = packing.loads(held), packing.left(held)
    spare = spare[:_LOOKED_AT]
    # The units of a group, and −1 if it takes a unit without giving one. Each part contributes some
    # partners, so that no part is overlooked.
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
    """Shuffle the holders of the units.

    Every unit keeps its number of holders, and every group keeps its number of units. Pairs of
    groups shuffle the units that only one of them has, and split them again in the same numbers. A
    pair keeps its units if the new split overflows a group's room or gives a group more than
    ``slowest`` work.

    This is the "curveball" walk over matrices of given margins (Strona et al. 2014, Nature Comm.
    5:4114).

    Args:
        packing: the room of the groups and the demands of the units.
        held: the filling to shuffle. It is not changed.
        seed: the seed of PCG64.
        slowest: the largest work that a group may get.
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
