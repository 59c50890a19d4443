"""Exchange equal units between groups, so that a unit's holders reach it at the same time in
backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .packing import Packing


def in_step(packing: Packing, held: np.ndarray, bundles: Sequence[Sequence[int]], work: Sequence[int]) -> np.ndarray:
    """Exchange holders among equal units so that a unit's holders reach it together in backward.

    Under forward masking a group skips the units that it does not hold. A holder that has done less
    work has its gradient earlier, and its reduction waits for the other holders. So this goes from
    the last unit to the first. Each unit gets one of the holder sets of the units that are equal to
    it: the set whose members have done the least work so far. The old filling stays if its holders
    wait less.

    All other guarantees of a placement stay. Equal units have equal size, work, number of holders
    and number of copies.

    Args:
        packing: the room of the groups and the demands of the bundles.
        held: the filling, shape (groups, bundles).
        bundles: ``bundles[b]`` are the units, in the model's order, whose holders are column ``b``.
        work: the work of each unit, shape (units,).
    """
    of_bundle = {unit: bundle for bundle, units in enumerate(bundles) for unit in units}
    backwards = sorted(of_bundle, reverse=True)
    scale = max(
        1, math.gcd(*(work[unit] for unit in backwards))
    )  # the FLOPs of many units and groups would overflow 64 bits
    work = [value // scale for value in work]
    counts = held.sum(axis=0)
    kinds = np.column_stack((packing.size, packing.work, packing.wanted, counts, [len(units) for units in bundles]))
    kind_of = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    # By kind: members (sets, k), and how many units have them.
    unused: list[tuple[np.ndarray, np.ndarray]] = []
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
    """Return the total work for which holders that have a unit's gradient wait for its last
    holder.
    """
    behind, waiting = np.zeros(len(held), dtype=np.int64), 0
    for unit in backwards:
        members = held[:, of_bundle[unit]]
        behind[members] += work[unit]
        waiting += int((behind[members].max() - behind[members]).sum())
    return waiting
