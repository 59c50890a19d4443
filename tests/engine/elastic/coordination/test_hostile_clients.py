"""Twenty clients that mean harm, in another process: they delay no vote and keep no group away."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sdp.engine.elastic.coordination.assembly import Assembly, Identity
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.coordination.records import STEP
from sdp.tests.support.clusters.hostile import COUNT, KINDS, Attack, attacked
from sdp.tests.support.network.sockets import connections_at
from sdp.tests.support.processes import until

TOKEN = b"a shared secret"
GROUPS = 3
BLOCKS, VOTES = 3, 30  # of each kind in turn, and in a block
PAUSE = 0.01  # seconds between two votes, as a short step takes
HELD = 4  # connections that the hostile clients hold at least while a vote counts as attacked
# Far above a vote, which takes some milliseconds. A slow client takes 40 s for its greeting, and a
# silent one holds its connection for 5 s.
LONGEST = 1.0  # seconds
MOST_MEDIAN = 100  # milliseconds of a vote under attack, also on a busy machine


class Members:
    """Groups of one rank each, whose requests run in threads."""

    def __init__(self, port: int):
        self._port = port
        self.clients = {slot: self._client(slot, "first") for slot in range(GROUPS)}
        self.steps, self.fresh = 0, set(range(GROUPS))
        self.threads = ThreadPoolExecutor(GROUPS)

    def _client(self, slot: int, life: str) -> CoordinatorClient:
        who = Identity(slot, 0, 1, f"{life}-{slot}", "here", f"127.0.0.1:{1000 + slot}")
        return CoordinatorClient(("127.0.0.1", self._port), TOKEN, who, heartbeat_seconds=60.0, wait_seconds=20.0)

    def ask(self, *slots: int) -> list[Assembly]:
        """Let these groups join, and return the generation as each of them sees it."""

        def join(slot: int) -> Assembly:
            is_fresh = slot in self.fresh
            return self.clients[slot].join(step=0 if is_fresh else self.steps, phase=STEP, fresh=is_fresh)

        found = list(self.threads.map(join, slots, timeout=20))
        self.fresh -= set(slots)
        return found

    def vote(self, *slots: int) -> bool:
        """Vote for a step, and return whether another group waits to join."""
        decisions = list(
            self.threads.map(lambda slot: self.clients[slot].vote(slot, step=self.steps), slots, timeout=20)
        )
        assert [decision.facts for decision in decisions] == [slots] * len(slots)
        self.steps += 1
        return decisions[0].newcomers

    def lose(self, slot: int) -> None:
        """Let a group die."""
        self.clients[slot].hang_up()

    def bring_back(self, slot: int) -> None:
        """Let a group come again, as a fresh one."""
        self.clients[slot] = self._client(slot, "second")
        self.fresh.add(slot)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def coordinator(said: list[str]) -> Iterator[Coordinator]:
    made = Coordinator(GROUPS, 1, TOKEN, said.append, heartbeat_seconds=60.0, wait_seconds=60.0)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    return path


def timed_vote(members: Members, port: int) -> tuple[float, int]:
    """Vote, and return how long it took, and how many connections of strangers there were."""
    time.sleep(PAUSE)
    strangers = connections_at(port) - GROUPS
    began = time.perf_counter()
    members.vote(*range(GROUPS))
    return time.perf_counter() - began, strangers


def attacked_votes(members: Members, port: int, attack: Attack) -> list[float]:
    """Return the seconds of votes, each made while hostile clients had connections.

    No vote may take long. Each kind of clients does harm between the first vote and the last one.
    """
    before, votes, idle = attack.count(), [], [*KINDS]
    while len(votes) < VOTES or (idle := attack.idle_kinds(before)):
        votes.append(timed_vote(members, port))
        assert votes[-1][0] < LONGEST
        assert len(votes) < 10 * VOTES, f"clients that do nothing: {idle}"
    return [seconds for seconds, strangers in votes if strangers >= HELD]


def test_twenty_hostile_clients_do_not_delay_a_vote(
    coordinator: Coordinator, token_file: Path, said: list[str], record_property: Callable[[str, object], None]
) -> None:
    """Votes with and without the attack take turns. No vote waits for a client, slow as it is."""
    members, port = Members(coordinator.port), coordinator.port
    members.ask(*range(GROUPS))
    alone: list[float] = []
    under_attack: list[float] = []
    for _ in range(BLOCKS):
        until(lambda: connections_at(port) <= GROUPS)  # those of the last attack are gone
        votes = [timed_vote(members, port) for _ in range(VOTES)]
        # Linux lists sockets one after the other, so the list may have one twice, or lack one.
        alone += [seconds for seconds, strangers in votes if strangers <= 0]
        with attacked("127.0.0.1", port, token_file) as attack:
            under_attack += attacked_votes(members, port, attack)
    medians = [1000 * statistics.median(each) for each in (alone, under_attack)]
    print(f"a vote takes {medians[0]:.2f} ms, with {COUNT} hostile clients {medians[1]:.2f} ms (medians)")
    print(f"the slowest of {len(alone)} and {len(under_attack)}: {max(alone):.3f} s and {max(under_attack):.3f} s")
    record_property("median_ms_alone", medians[0])
    record_property("median_ms_under_attack", medians[1])
    assert min(len(alone), len(under_attack)) >= 0.9 * BLOCKS * VOTES
    assert medians[1] < MOST_MEDIAN
    assert not said
    assert coordinator.membership.living == [*range(GROUPS)]


def test_a_group_joins_while_twenty_hostile_clients_attack(
    coordinator: Coordinator, token_file: Path, said: list[str]
) -> None:
    """All groups of the start, and one that was lost and comes again."""
    with attacked("127.0.0.1", coordinator.port, token_file) as attack:
        before = attack.count()
        members = Members(coordinator.port)
        assert [each.slots for each in members.ask(0, 1, 2)] == [[0, 1, 2]] * GROUPS
        members.vote(0, 1, 2)
        members.lose(1)
        assert members.clients[0].abort.wait(20)
        assert [each.slots for each in members.ask(0, 2)] == [[0, 2]] * 2
        members.vote(0, 2)
        members.bring_back(1)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(members.clients[1].join, step=0, phase=STEP, fresh=True)
            until(lambda: members.vote(0, 2))
            rest = members.ask(0, 2)
            assemblies = [joining.result(20), *rest]
        assert [each.slots for each in assemblies] == [[0, 1, 2]] * GROUPS
        assert [member.fresh for member in assemblies[0].members] == [False, True, False]
        assert assemblies[0].step == members.steps
        members.vote(0, 1, 2)
        until(lambda: not attack.idle_kinds(before), pause=0.1)
        assert connections_at(coordinator.port) > GROUPS
    (lost,) = [line for line in said if "was lost" in line]
    assert "group 1 on here" in lost
    assert coordinator.membership.living == [0, 1, 2]
