"""A rank that hangs in the first runs of a part, which may take long because they compile."""

from __future__ import annotations

import pytest
from sdp.engine.elastic.coordination.progress import PausedRanks, Progress
from sdp.tests.support.network.coordinator_rules import HEARTBEAT, Clock

VARIED = {"checkpoint": 200.0, "meeting": 50.0}


class IdleCPU:
    """Seconds without use of the CPU, that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("part", ["forward", "meeting"])
def test_a_rank_hangs_in_the_first_runs_of_a_part_if_it_does_not_use_the_cpu(part: str) -> None:
    clock, cpu = Clock(), IdleCPU()
    computing = {"forward", "meeting"}
    made = Progress(HEARTBEAT, ["forward", "data"], VARIED, clock, computing=computing, idle_cpu=cpu)
    for _ in range(2 if part == "forward" else 1):
        made.begin(part)
        clock.now += 40  # it compiles
        assert made.signs()["pause"] is None
        cpu.seconds = HEARTBEAT + 0.1
        assert made.signs() == {
            "pause": pytest.approx(HEARTBEAT + 0.1), "idle": 40, "is_first": True, "waits": False
        }  # fmt: skip
        made.note()  # it has not used the CPU while it waited for others
        assert made.signs()["pause"] is None
        made.begin("data")
        clock.now += 40
        assert made.signs()["pause"] is None
        cpu.seconds = 0
    made.begin(part)  # now its longest pause is known, and it may wait for as long
    clock.now += 40
    cpu.seconds = 40
    assert made.signs()["pause"] is None
    clock.now += 1000
    assert made.signs() == {"pause": 1040, "idle": 1040, "is_first": False, "waits": False}


@pytest.mark.parametrize("worker", ["own", "other"])
def test_a_rank_is_not_cut_off_in_the_first_runs_while_another_one_is_at_work(worker: str) -> None:
    """It may wait for that one in its group, or for a lock of a compiler. It has begun later."""
    groups = {"waits": 1, "own": 1, "other": 0, "polls": 2}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("waits", 100.0, 5.1, 5.1, is_first=True)
    paused.hear(worker, 100.0, None, 4.0)
    paused.hear("polls", 103.0, None, 0.01, waits=True)
    assert paused.worst(104.0, groups) is None  # its next heartbeat may take as long as the limit of silence
    paused.hear(worker, 104.5, None, 0.1)  # it goes on
    assert paused.worst(104.6, groups) is None
    paused.hear(worker, 105.0, waits=True)
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
            name: Progress(HEARTBEAT, ["forward"], clock=clock, computing=["forward"], idle_cpu=idle)
            for name, idle in (("waits", lambda: 60.0), ("polls", lambda: 0.0), ("compiles", lambda: 0.0))
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


def test_of_two_ranks_that_do_not_use_the_cpu_in_their_first_runs_the_first_one_is_cut_off() -> None:
    groups = {"waits inside": 1, "hangs": 1, "polls": 0}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("waits inside", 100.0, 5.1, 5.1, is_first=True)
    paused.hear("hangs", 100.0, 5.2, 5.2, is_first=True)
    paused.hear("polls", 100.0, None, 0.01, waits=True)
    assert paused.worst(100.3, groups) == ("hangs", pytest.approx(5.5))


def test_a_rank_that_goes_on_to_later_runs_is_judged_by_their_limit() -> None:
    groups = {"hangs": 1, "own": 1, "active": 0}
    paused = PausedRanks(HEARTBEAT)
    paused.hear("hangs", 100.0, 5.1, 5.1, is_first=True)
    paused.hear("hangs", 101.0, 8.0, 8.0)
    paused.hear("own", 101.0, None, 4.0)
    paused.hear("active", 101.0)  # at work, and the limits of later runs do not depend on that
    assert paused.worst(101.3, groups) == ("hangs", pytest.approx(8.3))
