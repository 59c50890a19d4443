"""A rank whose main thread hangs while its heartbeats go on, and who is cut off for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.elastic.abort import Abort, WaitLimits
from sdp.engine.elastic.coordination.addresses import serve_meeting_store
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.member import CoordinatorClient, Identity
from sdp.engine.elastic.coordination.messages import ProtocolError
from sdp.engine.elastic.coordination.progress import PausedRanks, Progress
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.process_groups import AbortableGroup, Meeting
from sdp.tests.support.network.coordinator_rules import HEARTBEAT, Clock
from sdp.tests.support.processes import until

GROUPS = {"guilty": 1, "innocent": 1, "active": 0}


def test_an_operation_of_an_ended_generation_is_progress() -> None:
    """An evaluation goes on to its end when a group is lost. Nothing waits in it any more."""
    noted: list[float] = []
    abort = Abort(lambda: True, lambda _: None, lambda: noted.append(time.monotonic()))
    group = AbortableGroup(dist.ProcessGroupGloo(dist.HashStore(), 0, 1), [0], "of one", abort, timedelta(60))
    try:
        with abort.deferred():
            for _ in range(3):
                group.allreduce([torch.ones(1)]).wait()
    finally:
        group.forget()
    assert len(noted) == 6  # when each begins, and when each ends


@pytest.mark.parametrize("operation", ["allreduce", "send"])
def test_an_operation_has_the_limit_of_what_the_rank_does(operation: str) -> None:
    """Not that of a connection, and a later one than gloo's that it is given up for."""
    store, address = serve_meeting_store("127.0.0.1")

    def work(rank: int, late: float, patience: float) -> float:
        given_up = lambda began: time.monotonic() - began > patience  # noqa: E731
        abort = Abort(lambda: False, lambda _: None, given_up=given_up)
        name = f"{operation} {patience}"
        meeting = Meeting(address, name, rank, rank, abort, WaitLimits(1.0, given_up, 30.0), "127.0.0.1")
        group = meeting.make_group("world", [0, 1])
        if rank:
            time.sleep(late)
        tensor = torch.full((1,), float(rank))
        try:
            started = time.monotonic()
            if operation == "allreduce":
                group.allreduce([tensor]).wait()
            elif rank:
                group.send([tensor], 0, 0).wait()
            else:
                group.recv([tensor], 1, 0).wait()
            assert tensor.item() == 1
        finally:
            meeting.leave()
        return time.monotonic() - started

    with ThreadPoolExecutor(2) as threads:
        waited, _ = threads.map(partial(work, late=2.5, patience=20.0), range(2), timeout=60)
        assert waited > 2
        first, second = [threads.submit(work, rank, 4.0, 0.5) for rank in range(2)]
        with pytest.raises(StepAbortedError, match=r"no answer from other groups after \d s"):
            first.result(60)
        assert isinstance(second.exception(60), StepAbortedError | None)
    del store


def progress(clock: Clock, *, forward: float = 1.0) -> Progress:
    """Return the progress of a main thread that has run "forward" twice, and is in it again."""
    made = Progress(HEARTBEAT, ["forward", "backward"], clock=clock)
    for _ in range(2):
        made.begin("forward")
        clock.now += forward
        made.begin("meeting")
    made.begin("forward")
    return made


@pytest.mark.parametrize("forward", [1.0, 30.0])
def test_a_part_may_pause_for_a_heartbeat_longer_than_it_ever_did(forward: float) -> None:
    clock = Clock()
    made = progress(clock, forward=forward)
    clock.now += HEARTBEAT + forward - 0.1
    assert made.signs()["pause"] is None
    clock.now += 0.2
    assert made.signs()["pause"] == pytest.approx(HEARTBEAT + forward + 0.1)
    made.note()
    assert made.signs()["pause"] is None


def test_who_waits_for_others_or_is_in_a_part_with_its_own_limit_does_not_hang() -> None:
    clock = Clock()
    made = progress(clock)
    with made.waiting():
        clock.now += 1000
        assert made.signs()["pause"] is None
    assert made.signs()["pause"] is None
    for part in ("evaluation", "backward"):  # the second one runs for the first time
        made.begin(part)
        clock.now += 1000
        assert made.signs()["pause"] is None


VARIED = {"checkpoint": 200.0, "meeting": 50.0}


@pytest.mark.parametrize(("part", "seconds"), VARIED.items())
def test_the_first_run_of_a_part_that_varies_has_a_limit_of_its_own(part: str, seconds: float) -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, (), VARIED, clock)
    made.begin(part)
    clock.now += seconds - 0.1
    assert made.signs()["pause"] is None
    clock.now += 0.2
    assert made.signs()["pause"] == pytest.approx(seconds + 0.1)


@pytest.mark.parametrize("checkpoint", [1.0, 30.0])
def test_a_part_that_varies_may_pause_for_a_heartbeat_and_four_times_its_longest_pause(checkpoint: float) -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, (), VARIED, clock)
    for seconds in (checkpoint, 0.1):
        made.begin("checkpoint")
        clock.now += seconds
        made.begin("meeting")
    made.begin("checkpoint")
    clock.now += HEARTBEAT + 4 * checkpoint - 0.1
    assert made.signs()["pause"] is None
    clock.now += 0.2
    assert made.signs()["pause"] == pytest.approx(HEARTBEAT + 4 * checkpoint + 0.1)


def test_the_limit_of_a_part_that_varies_does_not_grow_without_end() -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, (), VARIED, clock)
    for _ in range(2):
        made.begin("meeting")
        clock.now += 49.9
        assert made.signs()["pause"] is None
    clock.now += 0.2
    assert made.signs()["pause"] == pytest.approx(50.1)


def test_a_part_inside_another_one_has_its_own_limit() -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, (), {"meeting": 50.0, "loading": 500.0}, clock)
    made.begin("meeting")
    with made.during("loading"):
        clock.now += 499
        assert made.signs()["pause"] is None
    clock.now += 49.9
    assert made.signs()["pause"] is None
    clock.now += 0.2
    assert made.signs()["pause"] == pytest.approx(50.1)


def test_a_wait_inside_the_group_is_no_pause_but_is_known() -> None:
    """The coordinator lets a rank that it has cut off end in such a wait."""
    clock = Clock()
    made = progress(clock)
    with made.waiting(inside=True):
        clock.now += 1000
        assert made.signs()["pause"] is None
        assert made.idle == 0
        assert made.waits_inside
    assert not made.waits_inside


def test_pauses_that_are_interrupted_by_signs_of_progress_are_not_added_up() -> None:
    clock = Clock()
    made = Progress(HEARTBEAT, ["forward"], clock=clock)
    for _ in range(3):
        made.begin("forward")
        for _ in range(10):
            clock.now += 1
            made.note()
    clock.now += HEARTBEAT + 1.5
    assert made.signs()["pause"] == pytest.approx(HEARTBEAT + 1.5)


def test_the_rank_of_the_longest_pause_is_cut_off_and_the_others_get_time() -> None:
    """Another rank told its pause first, but it waits inside its group for the first one."""
    paused = PausedRanks(HEARTBEAT)
    paused.hear("active", 100.0, None)
    paused.hear("innocent", 100.0, 5.1, 5.1)
    paused.hear("guilty", 100.1, 6.0, 6.0)
    assert paused.worst(100.3, GROUPS) is None  # one of a longer pause may not have told it yet
    assert paused.worst(100.4, GROUPS) == ("guilty", pytest.approx(6.3))
    paused.forget("guilty")
    paused.hear("innocent", 100.4, 5.5, 5.5)
    assert paused.worst(101.0, GROUPS) is None
    paused.hear("innocent", 101.0, None)
    paused.hear("innocent", 110.0, 12.0, 12.0)
    paused.hear("active", 110.0, None)
    assert paused.worst(110.3, GROUPS) == ("innocent", pytest.approx(12.3))


def test_no_group_is_cut_off_while_the_others_make_no_progress_either() -> None:
    """For example, a file system that all of them write to has stopped."""
    paused = PausedRanks(HEARTBEAT)
    for peer, pause in {"guilty": 20.0, "innocent": 19.0, "active": None}.items():
        paused.hear(peer, 100.0, pause, pause or 18.0)  # the limit of the last one is higher
    assert paused.worst(100.3, GROUPS) is None
    paused.hear("innocent", 130.0, None)  # of the same group as "guilty"
    assert paused.worst(130.1, GROUPS) is None
    paused.hear("active", 130.1, None)
    assert paused.worst(130.2, GROUPS) == ("guilty", pytest.approx(50.2))


def test_a_rank_that_waits_for_a_slower_one_of_its_group_is_not_guilty() -> None:
    """The slower one is within its limit. It opens files, for example."""
    paused = PausedRanks(HEARTBEAT)
    paused.hear("active", 100.0, None)
    paused.hear("innocent", 100.0, 10.0, 10.0)
    paused.hear("guilty", 100.0, None, 12.0)
    assert paused.worst(100.3, GROUPS) is None
    paused.hear("guilty", 100.5, 12.5, 12.5)
    assert paused.worst(100.8, GROUPS) == ("guilty", pytest.approx(12.8))


def test_the_guilty_rank_is_found_behind_one_that_waits_longer() -> None:
    """That one waits inside its group for a rank that waits for the guilty one's group."""
    groups = {"guilty": 0, "its neighbour": 0, "waits inside": 1, "waits for others": 1}
    paused = PausedRanks(HEARTBEAT)
    for peer, idle in {"guilty": 8.0, "its neighbour": 7.9, "waits inside": 9.0, "waits for others": 0.0}.items():
        paused.hear(peer, 100.0, idle or None, idle)
    assert paused.worst(100.3, groups) == ("guilty", pytest.approx(8.3))


def test_the_only_living_group_is_not_cut_off() -> None:
    paused = PausedRanks(HEARTBEAT)
    paused.hear("guilty", 100.0, 50.0, 50.0)
    paused.hear("active", 100.0, None)  # it asks to join
    assert paused.worst(100.5, {"guilty": 1}) is None


def test_a_rank_that_goes_on_in_time_is_not_cut_off() -> None:
    paused = PausedRanks(HEARTBEAT)
    paused.hear("active", 100.0, None)
    paused.hear("guilty", 100.0, 5.1, 5.1)
    paused.hear("guilty", 100.1, None)
    assert paused.worst(100.5, GROUPS) is None
    paused.hear("guilty", 101.0, 5.1, 5.1)
    paused.forget("guilty")
    assert paused.worst(102.0, GROUPS) is None


@pytest.mark.parametrize("sign", ["is_inactive", "waits"])
@pytest.mark.parametrize("value", [1, 0, "", None, []])
def test_a_wrong_sign_ends_the_connection(sign: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match="a wrong pause"):
        PausedRanks(HEARTBEAT).hear("rank", 1.0, **{sign: value})


def test_who_looks_for_messages_for_a_while_is_known_to_wait() -> None:
    clock = Clock()
    made = progress(clock)
    for _ in range(4):
        made.look()
        assert made.signs()["waits"] is False
        clock.now += 0.125
    made.look()
    assert made.signs()["waits"] is True
    clock.now += 1  # it computes with what it got
    assert made.signs()["waits"] is False
    made.note()
    made.look()
    assert made.signs()["waits"] is False
    with made.waiting():
        clock.now += 1
        assert made.signs()["waits"] is True
    assert made.signs()["waits"] is False


def test_a_group_of_which_all_ranks_wait_for_each_other_is_cut_off() -> None:
    """They only have to meet. One that waits for another that is still at work is no such case."""
    clock = Clock()
    ranks = {name: progress(clock) for name in ("first", "second")}
    groups = {"first": 1, "second": 1, "other": 0}
    paused = PausedRanks(HEARTBEAT)

    def hear() -> tuple[Any, float] | None:
        for name, rank in ranks.items():
            paused.hear(name, clock.now, **rank.signs())
        paused.hear("other", clock.now, waits=True)
        return paused.worst(clock.now, groups)

    with ranks["first"].waiting(inside=True):
        clock.now += 10 * HEARTBEAT
        assert hear() is None
        with ranks["second"].waiting(inside=True):
            clock.now += HEARTBEAT - 0.1
            assert hear() is None
            clock.now += 0.2
            assert hear() == ("first", pytest.approx(HEARTBEAT + 0.1))
            assert hear() is None  # the others have time to go on
            clock.now += HEARTBEAT
            assert hear() is not None
        clock.now += HEARTBEAT
        assert hear() is None


def test_a_wait_of_all_groups_inside_has_a_cause_that_they_share() -> None:
    clock = Clock()
    paused, made = PausedRanks(HEARTBEAT), progress(clock)
    with made.waiting(inside=True):
        clock.now += 2 * HEARTBEAT
        paused.hear("first", clock.now, **made.signs())
        assert paused.worst(clock.now, {"first": 1}) is None
        paused.forget("first")
        assert paused.worst(clock.now, {"first": 1, "other": 0}) is None


@pytest.mark.parametrize("pause", ["5", -1, True, float("nan"), float("inf"), 1e10, [], {}])
def test_a_pause_that_is_none_ends_the_connection(pause: Any) -> None:
    with pytest.raises(ProtocolError, match="a wrong pause"):
        PausedRanks(HEARTBEAT).hear("rank", 1.0, pause)
    with pytest.raises(ProtocolError, match="a wrong pause"):
        PausedRanks(HEARTBEAT).hear("rank", 1.0, None, pause)
    with pytest.raises(ProtocolError, match="a wrong pause"):
        PausedRanks(HEARTBEAT).hear("rank", 1.0, inside=pause)


def test_a_main_thread_that_hangs_is_cut_off_and_its_process_is_told() -> None:
    """Its connection and its heartbeats go on."""
    said: list[str] = []
    hangs: list[str] = []
    token, heartbeat = b"a shared secret", 1.0
    coordinator = Coordinator(2, 1, token, said.append, heartbeat_seconds=heartbeat, wait_seconds=20)
    coordinator.start()
    try:
        clients = [
            CoordinatorClient(
                ("127.0.0.1", coordinator.port),
                token,
                Identity(slot, 0, 1, f"life {slot}", "here", ""),
                heartbeat_seconds=heartbeat,
                wait_seconds=20,
                progress=Progress(heartbeat, ["forward"]),
                on_hang=hangs.append,
            )
            for slot in range(2)
        ]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda client: client.join(step=0, phase=STEP, fresh=True), clients))
        for _ in range(3):
            clients[1].progress.begin("forward")
        began = time.monotonic()
        with pytest.raises(StepAbortedError):
            clients[0].vote(None, step=0)
        assert heartbeat <= time.monotonic() - began < 10 * heartbeat
        clients[0].join(step=0, phase=STEP, fresh=False)
        clients[0].vote(None, step=0)
        assert "group 1 on here was lost after step 0 (no progress for 1." in until(lambda: said or None)[0]
        assert "no progress for 1." in until(lambda: hangs or None)[0]
    finally:
        coordinator.stop()


def test_a_main_thread_that_hangs_for_very_long_ends_its_process_in_any_part() -> None:
    """Also if no other group is left that could go on without it."""
    hangs: list[str] = []
    token, heartbeat = b"a shared secret", 1.0
    coordinator = Coordinator(1, 1, token, lambda _: None, heartbeat_seconds=heartbeat, wait_seconds=20)
    coordinator.start()
    try:
        progress = Progress(heartbeat)
        client = CoordinatorClient(
            ("127.0.0.1", coordinator.port),
            token,
            Identity(0, 0, 1, "life", "here", ""),
            heartbeat_seconds=heartbeat,
            progress=progress,
            on_hang=hangs.append,
            longest_pause=1.5,
        )
        client.join(step=0, phase=STEP, fresh=True)
        with progress.waiting():
            time.sleep(2)
        assert not hangs
        assert until(lambda: hangs or None)[0] == "no progress for 1.5 s"
    finally:
        coordinator.stop()
