"""No group is heard any longer: the coordinator's host is cut off, or its process was stopped."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.member import CoordinatorClient, Identity
from sdp.engine.elastic.coordination.records import STEP
from sdp.tests.support.network.coordinator_rules import HEARTBEAT, LAST_CALL, WAIT, Rules


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_that_fall_silent_together_come_back_with_their_state(ranks: int) -> None:
    """The coordinator's host was cut off from all, so no group is told that it was."""
    rules = Rules(ranks)
    names = [[f"{slot}-{inside}" for inside in range(ranks)] for slot in range(3)]

    def all_join(**words: Any) -> None:
        for slot, of_group in enumerate(names):
            for inside, peer in enumerate(of_group):
                rules.join(peer, slot, inside=inside, life=f"life {slot}", **words)

    all_join(fresh=True)
    rules.wait(1, *names[0])  # their last heartbeats come one after the other
    rules.wait(1, *names[1])
    rules.wait(12)
    assert rules.membership.failure is None and rules.membership.living == []
    assert not [sent for sent in rules.sent if sent[1] == "cut"]
    assert "no group is heard any longer; the groups have 30 s to come back with their state" in rules.said
    rules.sent.clear()
    all_join(step=7, members=(0, 1, 2))
    assert rules.generations() == [[0, 1, 2]] and rules.membership.step == 7


def all_are_silent_after_a_step(**words: Any) -> Rules:
    rules = Rules(**words)
    rules.begin()
    rules.vote()
    rules.wait(int(HEARTBEAT) + 1)
    assert rules.membership.living == []
    return rules


def test_a_group_that_missed_a_generation_does_not_bring_its_old_state_back() -> None:
    """Groups b and c have gone on without a after the first silence. A second one follows."""
    rules = all_are_silent_after_a_step()
    rules.come_back("bc")
    rules.wait(int(2 * HEARTBEAT) + 1, "b", "c")
    assert rules.generations()[-1] == [1, 2]
    rules.wait(int(HEARTBEAT) + 1)
    rules.sent.clear()
    rules.join("a", 0, step=1, members=(0, 1, 2))
    assert rules.sent == [("a", "cut", [])]


def test_a_link_that_comes_back_for_a_moment_costs_no_group() -> None:
    rules = all_are_silent_after_a_step()
    rules.join("a", 0, step=1, members=(0, 1, 2))
    rules.wait(int(HEARTBEAT) + 1)  # silent again, before b and c came
    rules.sent.clear()
    rules.come_back("abc")
    assert rules.generations() == [[0, 1, 2]]


def test_silent_groups_are_awaited_although_another_one_is_gone_for_good() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.gone.add(2)
    rules.membership.lose("c", "its connection was closed")
    rules.come_back("ab")
    rules.sent.clear()
    rules.wait(int(HEARTBEAT) + 1)
    assert rules.membership.failure is None and rules.membership.living == []
    for slot, peer in enumerate("ab"):
        rules.join(peer, slot, step=1, members=(0, 1))
    assert rules.generations() == [[0, 1]]


def test_no_run_begins_from_nothing_when_silent_groups_come_back_without_state() -> None:
    rules = all_are_silent_after_a_step(min_groups=2)
    for slot, peer in enumerate("xyz"):
        assert rules.membership.failure is None
        rules.join(peer, slot, fresh=True, begun=True)
    assert rules.membership.failure is not None
    assert rules.membership.failure.startswith("all groups that had the state of the run are lost; start")
    assert len(rules.generations()) == 1


def test_a_group_whose_connection_closes_while_the_others_are_silent_may_come_back() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.wait(2, "c")
    rules.wait(4)
    rules.membership.lose("c", "its connection was closed")
    rules.sent.clear()
    rules.come_back("abc")
    assert rules.generations() == [[0, 1, 2]]


def test_groups_that_wait_for_a_meeting_may_come_back_when_all_timers_end_at_once() -> None:
    """As after a pause of the coordinator. Group a had not asked for the meeting, and is lost."""
    rules = Rules()
    rules.begin()
    rules.vote()
    number = rules.membership.generation.number if rules.membership.generation is not None else 0
    rules.membership.hear("a", {"type": "vote", "generation": number, "attempt": 1, "ok": False, "text": "x"})
    rules.come_back("bc")
    rules.now += HEARTBEAT + 1
    rules.membership.tick()
    assert rules.membership.failure is None and rules.membership.living == []
    rules.sent.clear()
    rules.come_back("bc", members=(1, 2))
    assert rules.generations() == [[1, 2]]


@pytest.mark.parametrize("asked", ["", "b"])
def test_groups_come_back_when_the_coordinator_itself_was_stopped(asked: str) -> None:
    """One of them may have asked for a meeting before. No group is told that it was cut off."""
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.come_back(asked)
    rules.sent.clear()
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up({"a"})
    rules.membership.tick()
    assert rules.membership.failure is None and rules.membership.living == [] and not rules.sent
    assert f"process was stopped for a while; the groups have {WAIT:g} s to come back" in rules.said[-1]
    rules.come_back("abc")
    assert rules.generations() == [[0, 1, 2]] and rules.membership.step == 1


def test_a_group_that_died_while_the_coordinator_was_stopped_is_not_awaited_for_long() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up({"a"})
    rules.come_back("ab")
    rules.sent.clear()
    rules.wait(int(2 * HEARTBEAT) + 1, "a", "b")
    assert rules.generations() == [[0, 1]]
    assert "group 2 was lost, because it did not come back to the coordinator in time" in rules.said[-1]
    rules.sent.clear()
    rules.come_back("c")
    assert rules.sent == [("c", "cut", [])]


def test_a_stop_of_the_coordinator_does_not_undo_the_end_of_the_run() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.hear("a", {"type": "bye"})
    rules.membership.wake_up({"a"})
    assert rules.membership.living == [0, 1, 2]


def test_groups_that_wait_for_the_start_are_not_lost_by_a_stop_of_the_coordinator() -> None:
    rules = Rules()
    rules.join("a", 0, fresh=True)
    rules.join("b", 1, fresh=True)
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up({"a", "b"})
    rules.membership.lose("a", "its connection was closed")
    rules.begin()
    assert rules.generations() == [[0, 1, 2]] and "cut" not in [kind for _, kind, _ in rules.sent]


def test_groups_that_are_awaited_are_not_lost_by_a_stop_of_the_coordinator() -> None:
    rules = all_are_silent_after_a_step()
    rules.come_back("ab")
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up({"a"})
    rules.sent.clear()
    rules.come_back("abc")
    assert rules.generations() == [[0, 1, 2]] and rules.membership.step == 1


@pytest.mark.parametrize("left", [{"c"}, {"a", "c"}])
def test_a_newcomer_is_not_lost_by_a_stop_of_the_coordinator(left: set[str]) -> None:
    rules = Rules(min_groups=2)
    rules.join("a", 0, fresh=True)
    rules.join("b", 1, fresh=True)
    rules.wait(int(LAST_CALL) + 1, "a", "b")
    rules.join("c", 2, fresh=True, begun=True)
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up(left)
    for peer in left:
        rules.membership.lose(peer, "its connection was closed")
    assert rules.membership.living == ([] if "a" in left else [0, 1])
    rules.sent.clear()
    rules.join("c", 2, fresh=True, begun=True)
    rules.come_back("ab", step=1, members=(0, 1))
    assert rules.generations() == [[0, 1, 2]] and "cut" not in [kind for _, kind, _ in rules.sent]


@pytest.mark.parametrize("left", [set(), {"a stranger"}])
def test_a_stop_of_the_coordinator_that_no_rank_has_noticed_costs_nothing(left: set[str]) -> None:
    rules = Rules()
    rules.begin()
    rules.sent.clear()
    rules.now += HEARTBEAT + 1
    rules.membership.wake_up(left)
    rules.membership.tick()
    assert rules.membership.living == [0, 1, 2] and not rules.sent


def test_the_time_of_a_stop_is_not_time_in_which_groups_did_not_come() -> None:
    rules = Rules()
    rules.join("a", 0, fresh=True)
    rules.now += WAIT + 1
    rules.membership.wake_up({"a"})
    rules.membership.tick()
    rules.begin()
    assert rules.generations() == [[0, 1, 2]]


def test_groups_that_fall_silent_at_the_same_step_again_and_again_end_the_run() -> None:
    rules = all_are_silent_after_a_step()
    for _ in range(20):
        rules.come_back("abc")
        rules.wait(int(HEARTBEAT) + 1)
    assert rules.membership.failure == "all groups are lost; start the run again with --resume"
    assert sum("no group is heard" in line for line in rules.said) == 10


def test_groups_that_fall_silent_together_are_awaited_only_so_long() -> None:
    rules = Rules()
    rules.begin()
    rules.wait(int(HEARTBEAT) + 1)
    rules.wait(int(WAIT))
    assert rules.membership.failure is None
    rules.wait(1)
    assert rules.membership.failure == f"not all groups came within {WAIT:g} s; missing: 0, 1, 2"


def test_a_group_that_was_silent_while_others_were_heard_stays_lost() -> None:
    rules = Rules()
    rules.begin()
    rules.wait(6, "b", "c")
    for slot, peer in ((1, "b"), (2, "c")):
        rules.join(peer, slot, step=3, members=(0, 1, 2))
    rules.wait(6)  # now these two are silent
    rules.sent.clear()
    rules.join("a", 0, step=3, members=(0, 1, 2))
    assert rules.sent == [("a", "cut", [])]
    for slot, peer in ((1, "b"), (2, "c")):
        rules.join(peer, slot, step=5, members=(1, 2))
    assert rules.generations() == [[1, 2]]


@pytest.mark.parametrize(("stop", "awaits"), [(0.8, False), (2.0, True)])
def test_a_coordinator_that_was_stopped_while_it_read_a_message(stop: float, awaits: bool) -> None:
    """Here the message is shown on a terminal that does not take it. No group is cut off."""
    said: list[str] = []
    heartbeat, token = 2.0, b"a shared secret"

    def say(text: str) -> None:
        said.append(text)
        if text == "a line":
            time.sleep(stop * heartbeat)

    coordinator = Coordinator(3, 1, token, say, heartbeat_seconds=heartbeat, wait_seconds=60)
    coordinator.start()
    try:
        address = ("127.0.0.1", coordinator.port)
        who = [Identity(slot, 0, 1, f"life {slot}", "here", "") for slot in range(3)]
        clients = [
            CoordinatorClient(address, token, each, heartbeat_seconds=heartbeat, wait_seconds=60) for each in who
        ]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda client: client.join(step=0, phase=STEP, fresh=True), clients))
            list(threads.map(lambda client: client.vote(None, step=0), clients))
            clients[0].tell("a line")
            time.sleep((stop + 0.5) * heartbeat)
            assert coordinator.membership.living == ([] if awaits else [0, 1, 2])
            if awaits:
                found = list(threads.map(lambda client: client.join(step=1, phase=STEP, fresh=False).slots, clients))
                assert found == [[0, 1, 2]] * 3
            list(threads.map(lambda client: client.vote(None, step=1), clients))
        assert coordinator.membership.step == 2
        assert any("was stopped for a while" in line for line in said) == awaits
        assert not any("was lost" in line for line in said)
    finally:
        coordinator.stop()
