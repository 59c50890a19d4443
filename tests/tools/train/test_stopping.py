"""Signals to some groups of an elastic run, and to all of them."""

from __future__ import annotations

import signal
from collections.abc import Collection

import pytest
from sdp.tools.train.stopping import Outcome, Told, decide

QUIET, TOLD, LEAVES = Told(0, leaves=False), Told(signal.SIGTERM, leaves=False), Told(signal.SIGTERM, leaves=True)
STOP = Outcome(signal.SIGTERM)


def at_least_two(groups: Collection[int]) -> bool:
    return len(groups) >= 2


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([QUIET, QUIET, QUIET], Outcome()),
        ([QUIET, TOLD, QUIET], Outcome()),  # perhaps the others are told in a moment
        ([QUIET, LEAVES, QUIET], Outcome(leaving=frozenset({4}))),
        ([TOLD, LEAVES, TOLD], STOP),
        ([QUIET, LEAVES, LEAVES], STOP),  # one group alone cannot go on
        ([LEAVES, LEAVES, LEAVES], STOP),
    ],
)
def test_all_stop_if_all_are_told_and_else_those_leave_that_are(told: list[Told], expected: Outcome) -> None:
    assert decide(told, [1, 4, 5], 1, at_least_two) == expected


def test_a_signal_to_one_rank_is_a_signal_to_its_group() -> None:
    assert decide([QUIET, TOLD, TOLD, QUIET], [0, 1], 2, at_least_two) == STOP
    assert decide([QUIET, LEAVES, *[QUIET] * 4], [0, 1, 3], 2, at_least_two) == Outcome(leaving=frozenset({0}))


def test_nothing_is_decided_before_all_are_heard() -> None:
    assert decide([LEAVES], [0, 1], 1, at_least_two) == decide([TOLD], [0], 2, at_least_two) == Outcome()
