"""Packing: a filling keeps to the room of each group, and exchanges keep what a filling
guarantees.
"""

from __future__ import annotations

import numpy as np
import pytest
from sdp.engine.placement.packing import Packing, connect, fill, holders_of, shuffle


def _packing(room: list[int], size: list[int], wanted: list[int]) -> Packing:
    values = (room, size, size, wanted)
    return Packing(*(np.array(each, dtype=np.int64) for each in values))


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("by_work", [False, True])
def test_a_filling_keeps_to_room_and_wanted_holders(in_rounds: bool, by_work: bool) -> None:
    packing = _packing([10, 10, 10], [6, 5, 4, 3], [1, 2, 2, 1])
    held = fill(packing, in_rounds=in_rounds, by_work=by_work)
    assert (packing.left(held) >= 0).all()
    assert (held.sum(axis=0) <= packing.wanted).all()
    assert (held.sum(axis=0) >= 1).all()


def test_shuffling_keeps_room_and_holders_and_depends_on_the_seed_alone() -> None:
    packing = _packing([6] * 6, [1] * 12, [3] * 12)
    held = fill(packing, in_rounds=False, by_work=False)
    first = shuffle(packing, held, 1)
    assert (packing.left(first) >= 0).all()
    assert (first.sum(axis=0) == held.sum(axis=0)).all()
    assert (first == shuffle(packing, held, 1)).all()
    assert (first != shuffle(packing, held, 2)).any()


def test_connecting_joins_groups_that_share_no_unit() -> None:
    packing = _packing([2, 2, 2, 2], [1] * 4, [2] * 4)
    apart = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=bool)
    joined = connect(packing, apart.copy())
    reached = joined[0]
    for _ in range(4):
        reached = joined[(joined & reached).any(axis=1)].any(axis=0)
    assert reached.all()
    assert (joined.sum(axis=0) == 2).all()


def test_holders_are_sorted_groups() -> None:
    assert holders_of(np.array([[True, False], [False, True], [True, True]])) == ((0, 2), (1, 2))
