"""A rank that hangs while its process is idle, in the first runs of a part, which may take long
because they compile, and in later ones, which may take as long or longer.
"""

from __future__ import annotations

import math

import pytest
from sdp.engine.elastic.coordination.progress import PausedRanks, Progress
from sdp.tests.support.network.coordinator_rules import HEARTBEAT, Clock

VARIED = {"checkpoint": 200.0, "meeting": 50.0}


class Quiet:
    """Seconds for which the process was idle, and without files, that a test sets."""

    seconds, without_files = 0.0, math.inf

    def __call__(self) -> tuple[float, float]:
        return self.seconds, self.without_files


@pytest.mark.parametrize("part", ["forward", "meeting"])
def test_a_rank_hangs_in_any_run_of_a_part_if_its_process_is_idle(part: str) -> None:
    clock, process = Clock(), Quiet()
    busy = {"forward", "meeting"}
    made = Progress(HEARTBEAT, ["forward", "data"], VARIED, clock, busy=busy, quiet_process=process)
    for _ in range(2 if part == "forward" else 1):
        made.begin(part)
        clock.now += 40  # it compiles
        assert made.signs()["pause"] is None
        process.seconds = HEARTBEAT + 0.1
        assert made.signs() == {
            "pause": pytest.approx(HEARTBEAT + 0.1), "idle": 40, "is_inactive": True, "waits": False, "inside": None
        }  # fmt: skip
        made.note()  # its process was idle while it waited for others
        assert made.signs()["pause"] is None
        made.begin("data")
        clock.now += 40
        assert made.signs()["pause"] is None
        process.seconds = 0
    made.begin(part)  # now its longest pause is known
    clock.now += 40
    assert made.signs()["pause"] is None
    process.seconds = 40
    assert made.signs() == {"pause": 40, "idle": 40, "is_inactive": True, "waits": False, "inside": None}
    clock.now += 1000
    assert made.signs() == {"pause": 1040, "idle": 1040, "is_inactive": False, "waits": False, "inside": None}


def test_a_later_checkpoint_that_waits_for_its_files_is_no_hang() -> None:
    """It may take much longer than the one before, but not longer than the first one might."""
    clock, process = Clock(), Quiet()
    made = Progress(HEARTBEAT, (), VARIED, clock, busy=["checkpoint"], quiet_process=process)
    made.begin("checkpoint")
    clock.now += 1
    made.begin("step")
    made.begin("checkpoint")
    clock.now += 190
    process.without_files = HEARTBEAT + 3.9
    assert made.signs()["pause"] is None
    process.without_files = HEARTBEAT + 4.1
    assert made.signs()["pause"] == 190 and not made.signs()["is_inactive"]
    process.without_files = 0.0
    clock.now += 11
    assert made.signs()["pause"] == 201


@pytest.mark.parametrize("worker", ["own", "other"])
def test_an_idle_rank_is_not_cut_off_while_another_one_is_at_work(worker: str) -> None:
    """It may wait for that one in its group, or for a lock of a compiler. It has begun later."""
    groups = {"waits": 1, "own": 1, "other": 0, "polls": 2}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("waits", 100.0, 5.1, 5.1, is_inactive=True)
    paused.hear(worker, 100.0, None, 4.0)
    paused.hear("polls", 103.0, None, 0.01, waits=True)
    assert paused.worst(104.0, groups) is None  # its next heartbeat may take as long as the limit of silence
    paused.hear(worker, 104.5, None, 0.1)  # it goes on
    assert paused.worst(104.6, groups) is None
    for second in (105.0, 106.0, 107.0):
        paused.hear(worker, second, waits=True)
    assert paused.worst(107.4, groups) is None  # another one may have got the work, and not have told it
    paused.hear("polls", 107.0, None, 0.01, waits=True)
    assert paused.worst(107.6, groups) == ("waits", pytest.approx(12.7))


@pytest.mark.parametrize("phase", range(0, 100, 10))
def test_no_rank_is_cut_off_when_the_work_passes_from_one_rank_to_another(phase: int) -> None:
    """Rank "compiles" ends, and then waits for "polls", which goes on to compute. Heartbeats come
    once a second, at different times.
    """
    groups = {"waits": 1, "polls": 1, "compiles": 0}
    for other in range(0, 100, 10):
        clock = Clock()
        ranks = {
            name: Progress(HEARTBEAT, ["forward"], clock=clock, busy=["forward"], quiet_process=idle)
            for name, idle in (
                ("waits", lambda: (60.0, 60.0)),
                ("polls", lambda: (0.0, 60.0)),
                ("compiles", lambda: (0.0, 60.0)),
            )
        }
        paused = PausedRanks(HEARTBEAT)
        for rank in ranks.values():
            rank.begin("forward")
        for tick in range(1, 2300):  # of ten milliseconds
            clock.now = 100 + tick / 100
            ranks["polls" if tick < 2000 else "compiles"].look()
            for name, at in (("waits", 5), ("polls", phase), ("compiles", other)):
                if tick % 100 == at:
                    paused.hear(name, clock.now, **ranks[name].signs())
            if tick > 1000 and tick % 5 == 0:
                assert paused.worst(clock.now, groups) is None


def test_a_rank_that_sends_much_is_at_work_although_it_waits() -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, clock=clock, is_sending=lambda: True)
    with made.waiting():
        clock.now += 10
        assert made.signs()["waits"] is False


def test_of_two_ranks_with_idle_processes_the_first_one_is_cut_off() -> None:
    groups = {"waits inside": 1, "hangs": 1, "polls": 0}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("waits inside", 100.0, 5.1, 5.1, is_inactive=True)
    paused.hear("hangs", 100.0, 5.2, 5.2, is_inactive=True)
    paused.hear("polls", 100.0, None, 0.01, waits=True)
    assert paused.worst(100.3, groups) == ("hangs", pytest.approx(5.5))


def test_a_rank_that_was_not_heard_of_for_a_while_may_be_at_work() -> None:
    """It was stopped after it had said that it waits. The limit of silence ends it."""
    groups = {"waits inside": 1, "stopped": 1, "polls": 0}
    paused = PausedRanks(HEARTBEAT)
    for second in (100.0, 101.0):
        paused.hear("stopped", second, None, 0.01, waits=True)
    for second in (104.0, 105.0):
        paused.hear("waits inside", second, 5.1, 5.1, is_inactive=True)
        paused.hear("polls", second, None, 0.01, waits=True)
    assert paused.worst(105.3, groups) is None
    paused.hear("stopped", 105.4, None, 0.01, waits=True)  # it goes on
    assert paused.worst(105.5, groups) == ("waits inside", pytest.approx(5.6))


def test_when_a_group_is_lost_the_others_get_time_to_go_on() -> None:
    """A rank waits idle inside its group for one that waits for a slow rank. The slow one dies."""
    groups = {"slow": 0, "looks": 1, "waits inside": 1, "others": 2}
    paused = PausedRanks(HEARTBEAT)
    for second in range(100, 108):
        paused.hear("slow", second, None, second - 99.0)
        for peer in ("looks", "others"):
            paused.hear(peer, second, None, 0.01, waits=True)
        paused.hear("waits inside", second, 5.1 + second - 100, 5.1 + second - 100, is_inactive=True)
        assert paused.worst(second + 0.5, groups) is None
    paused.forget("slow")
    del groups["slow"]
    for second in range(108, 112):
        assert paused.worst(second, groups) is None
        for peer in ("looks", "others"):
            paused.hear(peer, second, None, 0.01, waits=True)
        paused.hear("waits inside", second, 6.0 + second - 100, 6.0 + second - 100, is_inactive=True)
    for second in (113.0, 113.3):  # it does not go on
        for peer in ("looks", "others"):
            paused.hear(peer, second, None, 0.01, waits=True)
        paused.hear("waits inside", second, second - 94, second - 94, is_inactive=True)
    assert paused.worst(113.4, groups) == ("waits inside", pytest.approx(19.4))


def test_a_rank_that_goes_on_to_later_runs_is_judged_by_their_limit_too() -> None:
    groups = {"hangs": 1, "own": 1, "active": 0}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("hangs", 100.0, 5.1, 5.1, is_inactive=True)
    paused.hear("hangs", 101.0, 8.0, 8.0)
    paused.hear("own", 101.0, None, 4.0)
    paused.hear("active", 101.0)  # at work, and the limits of later runs do not depend on that
    assert paused.worst(101.3, groups) == ("hangs", pytest.approx(8.3))
