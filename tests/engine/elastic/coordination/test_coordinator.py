"""The coordinator: votes, losses, returning groups, its own restart, and clients that mean harm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sdp.engine.elastic.coordination.assembly import Assembly, Decision, Identity
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.errors import CutOffError, StepAbortedError
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.coordination.messages import MOST_BYTES, Channel, ProtocolError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.errors import PeerLostError
from sdp.tests.support.clusters.hostile import hostile_clients, recorded
from sdp.tests.support.network.cut_link import CutLink
from sdp.tests.support.processes import until

TOKEN = b"a shared secret"
LONG = 60.0  # seconds of a heartbeat that no test reaches


class Group:
    """A group of one rank, whose requests run in a thread."""

    def __init__(
        self,
        port: int,
        slot: int,
        life: str = "first",
        *,
        heartbeat: float = LONG,
        token: bytes = TOKEN,
        ranks: int = 1,
        has_begun: Callable[[], bool] = lambda: False,
        on_hang: Callable[[str], None] = lambda _: None,
    ):
        who = Identity(slot, 0, ranks, f"{life}-{slot}", "here", f"127.0.0.1:{1000 + slot}")
        address = ("127.0.0.1", port)
        self.client = CoordinatorClient(
            address, token, who, heartbeat_seconds=heartbeat, wait_seconds=20.0, has_begun=has_begun, on_hang=on_hang
        )
        self.step, self.fresh = 0, True
        self._thread = ThreadPoolExecutor(1)

    def join(self, phase: int = STEP) -> Any:
        def work() -> Assembly:
            found = self.client.join(step=self.step, phase=phase, fresh=self.fresh)
            self.step, self.fresh = found.step, False
            return found

        return self._thread.submit(work)

    def vote(self) -> Any:
        def work() -> Decision:
            decision = self.client.vote({"slot": self.client.identity.slot}, step=self.step)
            self.step += 1
            return decision

        return self._thread.submit(work)

    def die(self) -> None:
        self.client.hang_up()


class Service:
    """A coordinator with what it said."""

    def __init__(
        self,
        groups: int = 3,
        *,
        port: int = 0,
        heartbeat: float = LONG,
        min_groups: int | None = None,
        last_call: float = 30.0,
    ):
        self.said: list[str] = []
        self.coordinator = Coordinator(
            groups, 1, TOKEN, self.said.append, port=port, heartbeat_seconds=heartbeat, wait_seconds=60.0,
            min_groups=min_groups, last_call_seconds=last_call,
        )  # fmt: skip
        self.coordinator.start()
        self.port = self.coordinator.port

    def started(self, groups: int = 3, *, heartbeat: float = LONG) -> list[Group]:
        members = [Group(self.port, slot, heartbeat=heartbeat) for slot in range(groups)]
        everyones = [each.result(20) for each in [member.join() for member in members]]
        assert len({assembly.name for assembly in everyones}) == 1
        return members

    def await_votes(self, number: int) -> None:
        """Wait until so many ranks have voted for the present step."""
        generation = self.coordinator.membership.generation
        until(lambda: generation is not None and len(generation.votes) == number)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.coordinator.stop()


def results(futures: list[Any]) -> list[Any]:
    return [future.result(20) for future in futures]


def assert_aborted(future: Any) -> None:
    with pytest.raises(StepAbortedError):
        future.result(20)


def test_a_step_is_committed_when_all_have_voted(service: Service) -> None:
    members = service.started()
    early = [members[0].vote(), members[2].vote()]
    service.await_votes(2)
    time.sleep(0.3)
    assert not any(vote.done() for vote in early)
    decisions = results([*early, members[1].vote()])
    assert [decision.facts for decision in decisions] == [({"slot": 0}, {"slot": 1}, {"slot": 2})] * 3


def test_who_cannot_finish_its_reductions_makes_all_repeat_the_step(service: Service) -> None:
    members = service.started()
    vote = members[0].vote()
    members[1].client.give_up("a neighbour is gone")
    assert_aborted(vote)
    assert members[2].client.abort.wait(10)
    again = results([member.join() for member in members])
    assert [assembly.slots for assembly in again] == [[0, 1, 2]] * 3
    assert again[0].number == 2
    assert not members[2].client.abort.is_set()
    results([member.vote() for member in members])
    assert [member.step for member in members] == [1, 1, 1]


def test_the_others_go_on_without_a_group_that_dies_and_with_it_when_it_returns(service: Service) -> None:
    members = service.started()
    results([member.vote() for member in members])
    votes = [members[0].vote(), members[2].vote()]
    members[1].die()
    for vote in votes:
        assert_aborted(vote)
    rest = [members[0], members[2]]
    assert [assembly.slots for assembly in results([member.join() for member in rest])] == [[0, 2]] * 2
    results([member.vote() for member in rest])
    said = until(lambda: service.said or None)[0]
    assert "group 1 on here was lost after step 1 (its connection was closed); groups 0, 2 went on after" in said
    back = Group(service.port, 1, "second")
    waiting = back.join()
    while not results([member.vote() for member in rest])[0].newcomers:
        pass
    assemblies = results([waiting, *(member.join() for member in rest)])
    assert [[member.fresh for member in assembly.members] for assembly in assemblies] == [[False, True, False]] * 3
    assert back.step == rest[0].step
    assert {assembly.writer for assembly in assemblies} == {0}
    results([member.vote() for member in [*rest, back]])


def test_a_newcomer_whose_first_generation_ends_early_is_still_without_state(service: Service) -> None:
    """Another group dies before it has got its state. It is not cut off."""
    members = service.started()
    results([member.vote() for member in members])
    members[1].die()
    rest = [members[0], members[2]]
    results([member.join() for member in rest])
    back = Group(service.port, 1, "second")
    waiting = back.join()
    while not results([member.vote() for member in rest])[0].newcomers:
        pass
    results([waiting, *(member.join() for member in rest)])
    back.fresh = True  # it got nothing
    members[2].die()
    assert members[0].client.abort.wait(10)
    again = results([members[0].join(), back.join()])
    assert [[(member.slot, member.fresh) for member in each.members] for each in again] == [[(0, False), (1, True)]] * 2


def test_a_newcomer_waits_until_the_others_are_before_a_step(service: Service) -> None:
    members = service.started()
    members[1].die()
    rest = [members[0], members[2]]
    results([member.join() for member in rest])
    back = Group(service.port, 1, "second")
    waiting = back.join()
    while not results([member.vote() for member in rest])[0].newcomers:  # until the coordinator has heard it
        pass
    first = results([rest[0].join(phase=1), rest[1].join(phase=STEP)])
    assert [(assembly.slots, assembly.phase) for assembly in first] == [([0, 2], 1)] * 2
    assert not waiting.done()
    assert results([waiting, *(member.join() for member in rest)])[0].slots == [0, 1, 2]


def test_a_group_that_votes_and_dies_costs_no_step(service: Service) -> None:
    members = service.started()
    members[1].vote()
    service.await_votes(1)
    members[1].die()
    until(lambda: service.coordinator.membership.living == [0, 2])
    decisions = results([members[0].vote(), members[2].vote()])
    assert [len(decision.facts) for decision in decisions] == [3, 3]
    assert members[0].client.abort.wait(10)  # its generation is over all the same
    assert results([members[0].join(), members[2].join()])[0].slots == [0, 2]


def test_two_groups_die_at_once(service: Service) -> None:
    members = service.started()
    vote = members[0].vote()
    members[1].die()
    members[2].die()
    assert_aborted(vote)
    assert members[0].join().result(20).slots == [0]
    members[0].vote().result(20)
    assert members[0].step == 1


def test_a_silent_group_is_cut_off_and_told_so_when_it_wakes_up() -> None:
    service = Service(heartbeat=1.0)
    members = service.started(heartbeat=1.0)
    sleeper = members[1].client
    sleeper.beat_seconds = 1e6  # it is silent from now on, as if it were stopped
    vote = members[0].vote()
    assert_aborted(vote)
    assert results([members[0].join(), members[2].join()])[0].slots == [0, 2]
    results([members[0].vote(), members[2].vote()])
    assert "no heartbeat for 1 s" in until(lambda: service.said or None)[0]
    with pytest.raises(CutOffError, match="group 1 was cut off"):
        members[1].join().result(20)
    service.coordinator.stop()


def test_a_group_whose_link_is_cut_notices_it_and_is_told_when_the_link_is_back() -> None:
    """No connection is closed while a link is down."""
    service = Service(heartbeat=1.0)
    link = CutLink(service.port)
    members = [Group(link.port if slot == 1 else service.port, slot, heartbeat=1.0) for slot in range(3)]
    results([member.join() for member in members])
    results([member.vote() for member in members])
    link.up.clear()
    began = time.monotonic()
    votes = [member.vote() for member in members]
    for vote in (votes[0], votes[2]):
        assert_aborted(vote)
    assert results([members[0].join(), members[2].join()])[0].slots == [0, 2]
    noticed = members[1].client.abort.wait(5)
    seconds = time.monotonic() - began
    link.up.set()
    assert noticed
    assert members[1].client.reason == "the coordinator is gone"
    assert seconds > 1
    with pytest.raises(CutOffError, match="group 1 was cut off"):
        votes[1].result(20)
    results([members[0].vote(), members[2].vote()])
    link.close()
    service.coordinator.stop()


def test_a_rank_that_waits_inside_its_group_asks_when_the_link_is_back() -> None:
    """The rank that it waits for may have ended behind the cut link, and says nothing."""
    service, hangs = Service(heartbeat=1.0), list[str]()
    link = CutLink(service.port)
    members = [
        Group(link.port if slot == 1 else service.port, slot, heartbeat=1.0, on_hang=hangs.append) for slot in range(3)
    ]
    results([member.join() for member in members])
    client = members[1].client
    with client.progress.waiting(inside=True):
        link.up.clear()
        for vote in (members[0].vote(), members[2].vote()):
            assert_aborted(vote)
        results([members[0].join(), members[2].join()])
        assert client.abort.wait(5) and not client.is_cut_off
        link.up.set()
        assert "the others have gone on without this group" in until(lambda: hangs or None)[0]
    assert results([members[0].vote(), members[2].vote()]), "a question changes nothing for the others"
    link.close()
    service.coordinator.stop()


def test_a_quiet_coordinator_is_not_a_lost_one() -> None:
    """It answers the signs of life of groups that wait for others, or that make a long step."""
    service = Service(heartbeat=0.5)
    members = [Group(service.port, slot, heartbeat=0.5) for slot in range(3)]
    waiting = [member.join() for member in members[:2]]
    time.sleep(1.5)
    results([*waiting, members[2].join()])
    time.sleep(1.5)
    assert not any(member.client.abort.is_set() for member in members)
    results([member.vote() for member in members])
    assert not service.said
    service.coordinator.stop()


def test_a_coordinator_that_is_started_again_learns_everything_from_the_ranks(service: Service) -> None:
    members = service.started()
    results([member.vote() for member in members])
    service.coordinator.stop()
    for member in members:
        assert member.client.abort.wait(10)
    other = Service(port=service.port)
    assemblies = results([member.join() for member in members])
    assert [(assembly.slots, assembly.step, assembly.number) for assembly in assemblies] == [([0, 1, 2], 1, 2)] * 3
    results([member.vote() for member in members])
    other.coordinator.stop()


def test_groups_that_wait_at_a_new_coordinator_do_not_begin_a_run_that_has_begun_meanwhile() -> None:
    """They ask again, and look at the run's files again."""
    asked: list[bool] = []
    first = Service(min_groups=2, last_call=0.2)
    waiting = Group(first.port, 2, has_begun=lambda: asked.append(True) or len(asked) > 1)
    answer = waiting.join()
    until(lambda: asked, 10)
    first.coordinator.stop()
    second = Service(port=first.port, min_groups=2, last_call=0.2)
    here: list[bool] = []
    late = Group(second.port, 1, has_begun=lambda: here.append(True) is not None)
    answers = [answer, late.join()]
    until(lambda: here and len(asked) > 1, 10)
    time.sleep(1.0)  # longer than the last call
    assert not any(each.done() for each in answers)
    assert second.coordinator.membership.generation is None
    trains = Group(second.port, 0)
    trains.step, trains.fresh = 7, False
    assert [each.result(20).step for each in [trains.join(), *answers]] == [7] * 3
    second.coordinator.stop()


@pytest.mark.parametrize("one_was_told", [True, False])
def test_a_coordinator_that_dies_amid_a_vote_leaves_all_with_the_same_steps(one_was_told: bool) -> None:
    """If one rank was told that the step is committed, all that voted for it commit it too."""
    service = Service()
    members = service.started()
    votes = [members[1].vote(), members[2].vote()]
    service.await_votes(2)
    service.coordinator.stop()
    if one_was_told:
        members[0].step += 1
    other = Service(port=service.port)
    joined = members[0].join(phase=STEP)
    if one_was_told:
        results(votes)
    else:
        for vote in votes:
            assert_aborted(vote)
    results([joined, members[1].join(), members[2].join()])
    assert [member.step for member in members] == [int(one_was_told)] * 3
    other.coordinator.stop()


@pytest.mark.parametrize("mistake", [{"token": b"another secret"}, {"ranks": 2}])
def test_a_rank_that_the_coordinator_does_not_know_says_what_may_be_wrong(
    service: Service, mistake: dict[str, Any]
) -> None:
    with pytest.raises(PeerLostError, match=r"closes the connection at once; it needs the same token"):
        Group(service.port, 0, **mistake).join().result(20)
    assert not service.coordinator.membership.living


# -- clients that mean harm ------------------------------------------------------------------------


def test_twenty_hostile_clients_do_not_keep_steps_from_being_committed(service: Service) -> None:
    members = service.started()
    with hostile_clients("127.0.0.1", service.port, recorded("127.0.0.1", service.port, TOKEN)):
        for step in range(30):
            results([member.vote() for member in members])
            assert [member.step for member in members] == [step + 1] * 3
            time.sleep(0.05)
        assert not service.said
        assert service.coordinator.membership.living == [0, 1, 2]


def test_a_message_counts_once_and_only_on_its_connection() -> None:
    def pair() -> tuple[Channel, Channel]:
        server, client = Channel(TOKEN, is_server=True), Channel(TOKEN, is_server=False)
        client.feed(server.greeting)
        server.feed(client.greeting)
        return server, client

    server, client = pair()
    first = client.seal({"type": "beat"})
    assert server.feed(first) == [{"type": "beat"}]
    with pytest.raises(ProtocolError, match="repeated"):
        server.feed(first)
    server, client = pair()
    with pytest.raises(ProtocolError, match="repeated"):  # recorded on another connection
        server.feed(first)
    server, client = pair()
    with pytest.raises(ProtocolError, match="repeated"):  # a message of the server, sent back to it
        server.feed(server.seal({"type": "beat"}))
    with pytest.raises(ValueError, match="longer than"):
        client.seal({"type": "beat", "text": "x" * MOST_BYTES})
    server, client = pair()
    with pytest.raises(ProtocolError, match="a message of"):  # before it is read
        server.feed(b"\xff" * 4)
