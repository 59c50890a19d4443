"""What of a step's traffic is hidden behind its computation: every kind of link carries one thing
at a time.
"""

from __future__ import annotations

import pytest
from sdp.engine.distributed.collectives import Collective, Kind, Scope
from sdp.tools.plan.machine import Machine, StepTime, step_time

# Two nodes of two ranks. A micro-batch computes for 3 s, 1 s of them forward; a byte takes 1 s over
# either link.
MACHINE = Machine((2, 2), 1.0, 1.0, 1.0, 1.0)
NEAR, FAR = (0, 1), (0, 2)


def sends(scope: Scope, seconds: int, ranks: tuple[int, ...], kind: Kind = "all_gather") -> Collective:
    """A collective of two ranks in which each sends so many bytes."""
    one = Collective(scope, kind, ranks, seconds * {"all_gather": 2, "all_reduce": 1, "broadcast": 1}[kind])
    assert one.sent == seconds
    return one


def gathers(seconds: int, ranks: tuple[int, ...]) -> Collective:
    return sends("inside groups", seconds, ranks)


def averages(seconds: int, ranks: tuple[int, ...]) -> Collective:
    return sends("between groups", seconds, ranks, "all_reduce")


def refreshes(seconds: int, ranks: tuple[int, ...]) -> Collective:
    return sends("between groups", seconds, ranks, "broadcast")


def time_of(*collectives: Collective, micro_batches: int = 1) -> StepTime:
    return step_time(3.0 * micro_batches, collectives, MACHINE, micro_batches)


@pytest.mark.parametrize("link", [NEAR, FAR])
def test_averages_hide_behind_the_last_backward_and_refreshes_behind_the_first_forward(link: tuple[int, ...]) -> None:
    assert time_of(averages(2, link)).step == pytest.approx(3)
    assert time_of(averages(3, link)).step == pytest.approx(4)
    assert time_of(refreshes(1, link)).step == pytest.approx(3)
    assert time_of(refreshes(2, link)).step == pytest.approx(4)
    assert time_of(averages(2, link), refreshes(1, link)).step == pytest.approx(3)
    assert time_of(averages(1, link), refreshes(2, link)).step == pytest.approx(4)  # backward is over before they start
    assert time_of(averages(3, link), refreshes(2, link), micro_batches=4).step == pytest.approx(12 + 1 + 1)


def test_what_goes_over_one_link_adds_up() -> None:
    """Each alone would be hidden behind the same seconds."""
    assert time_of(gathers(3, NEAR)).step == pytest.approx(3)
    assert time_of(gathers(3, NEAR), averages(2, NEAR)).step == pytest.approx(5)
    assert time_of(gathers(3, NEAR), averages(2, FAR)).step == pytest.approx(3)
    assert time_of(gathers(3, FAR), averages(2, FAR), refreshes(1, FAR)).step == pytest.approx(6)
    assert time_of(gathers(9, FAR), averages(2, FAR), refreshes(1, FAR), micro_batches=4).step == pytest.approx(
        12
    )  # three micro-batches are free


def test_a_link_that_is_full_takes_as_long_as_all_that_it_carries() -> None:
    assert time_of(gathers(7, FAR), averages(5, FAR), refreshes(4, FAR)).step == pytest.approx(16)


def test_kinds_of_link_are_told_apart_and_what_they_leave_exposed_adds_up() -> None:
    assert time_of(gathers(5, NEAR), averages(4, FAR)).step == pytest.approx(3 + 2 + 2)
    time = time_of(gathers(5, NEAR), averages(4, FAR), refreshes(1, FAR), averages(1, NEAR))
    assert (time.compute, time.inside, time.between, time.refresh) == (3, 5, 5, 1)


def test_tensor_parallel_traffic_is_never_hidden() -> None:
    time = time_of(sends("tensor parallel", 2, NEAR), gathers(3, NEAR))
    assert (time.tensor_parallel, time.step) == (2, pytest.approx(5))
