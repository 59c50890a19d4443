"""Which groups a generation has, when a run begins, and when it is over."""

from __future__ import annotations

import pytest
from sdp.engine.elastic.coordination.messages import ProtocolError
from sdp.engine.elastic.coordination.records import GIVE_UP
from sdp.tests.support.network.coordinator_rules import Rules


def test_a_fresh_group_at_a_new_coordinator_makes_no_other_group_late() -> None:
    rules = Rules()
    rules.join("c", 2, fresh=True)
    rules.wait(15, "c")
    for slot, peer in enumerate("ab"):
        rules.join(peer, slot, step=50, members=(0, 1))
    assert rules.generations() == [[0, 1, 2]]


def test_a_group_that_is_late_at_a_new_coordinator_is_cut_off() -> None:
    rules = Rules()
    rules.join("a", 0, step=50, members=(0, 1))
    rules.wait(11, "a")
    rules.join("b", 1, step=50, members=(0, 1))
    assert rules.generations() == [[0]]
    assert rules.sent[-1][:2] == ("b", "cut")


def test_whoever_asks_learns_whether_the_others_have_gone_on_and_joins_nothing() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.lose("c", "it died")
    for peer in "ab":
        rules.join(peer, "ab".index(peer), step=1, members=(0, 1, 2))
    begun = rules.generations()
    for life, fresh, answer in (
        ("a", False, "beat"),
        ("c", False, "cut"),
        ("an older one", False, "cut"),
        ("new", True, "beat"),
    ):
        rules.join("asks", 2 if life != "a" else 0, life=life, fresh=fresh, step=1, members=(0, 1, 2), kind="ask")
        assert rules.sent[-1] == ("asks", answer, []), life
        rules.membership.lose("asks", "it closed the connection")
    assert rules.generations() == begun
    assert rules.membership.living == [0, 1]
    for peer in "ab":
        rules.membership.hear(peer, {"type": "bye"})
    rules.join("asks", 2, life="c", step=1, members=(0, 1, 2), kind="ask")
    assert rules.sent[-1] == ("asks", "finished", [])
    assert rules.membership.told == {0, 1}, "whoever asks is not told, and comes back to be told"


def test_a_run_is_over_when_all_have_ended_or_are_gone() -> None:
    """Whoever has ended need not be told, and whoever is gone may come back, and is told then."""
    for dies in (False, True):
        rules = Rules()
        rules.begin()
        rules.vote()
        for peer in "ab":
            rules.membership.hear(peer, {"type": "bye"})
            rules.membership.lose(peer, "its connection was closed")
        assert not rules.membership.is_finished
        if not dies:
            rules.membership.hear("c", {"type": "bye"})
        rules.membership.lose("c", "its connection was closed")
        assert rules.membership.is_finished
        assert rules.membership.failure is None
        assert rules.membership.told == ({0, 1} if dies else {0, 1, 2})
        rules.join("c again", 2, fresh=True)
        assert rules.sent[-1][:2] == ("c again", "finished")


def test_a_group_that_is_back_too_late_does_not_keep_the_run_from_ending() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.lose("b", "it died")
    rules.join("b again", 1, fresh=True)
    for peer in "ac":
        rules.membership.hear(peer, {"type": "bye"})
    assert rules.membership.is_finished
    assert ("b again", "finished", []) in rules.sent
    assert rules.membership.told == {0, 1, 2}, "nobody need wait for it"


def test_a_group_of_two_ranks_ends_though_one_of_them_dies() -> None:
    rules = Rules(ranks=2)
    for inside in range(2):
        for slot, peer in enumerate("abc"):
            rules.join(f"{peer}{inside}", slot, fresh=True, inside=inside, life=peer)
    for peer in ("a0", "a1", "b0", "b1", "c0"):
        rules.membership.hear(peer, {"type": "bye"})
        rules.membership.lose(peer, "its connection was closed")
    assert not rules.membership.is_finished
    rules.membership.lose("c1", "it died")
    assert rules.membership.is_finished


def test_nobody_waits_for_a_group_that_has_ended() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.lose("b", "it died")
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, step=1, members=(0, 1, 2))
    rules.membership.hear("a", {"type": "bye"})
    rules.join("c", 2, step=1, members=(0, 2))
    rules.membership.lose("a", "its connection was closed")
    assert rules.generations()[-1] == [2]


def test_a_loss_before_the_first_vote_ends_nothing_if_the_others_have_state() -> None:
    for gone_first in (False, True):
        rules = Rules()
        rules.begin()
        rules.membership.lose("b", "it died")
        rules.join("a", 0, members=(0, 1, 2))
        if gone_first:
            rules.membership.gone.add(1)
            rules.wait(1, "a", "c")
        rules.join("c", 2, members=(0, 1, 2))
        assert rules.generations()[-1] == [0, 2]
        assert rules.membership.failure is None


def test_groups_without_state_begin_again_or_end() -> None:
    rules = Rules()
    rules.begin()
    rules.membership.lose("b", "it died")
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, fresh=True)
    assert rules.generations() == [[0, 1, 2]], "they wait for group 1"
    rules.sent.clear()
    rules.join("b again", 1, fresh=True)
    assert rules.generations() == [[0, 1, 2]]
    rules.membership.lose("b again", "it died")
    rules.membership.gone.add(1)
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, fresh=True)
    assert rules.membership.failure == "group 1 was lost before the first step, and is not started again"


def test_enough_groups_begin_after_the_last_call() -> None:
    rules = Rules(min_groups=2)
    rules.join("a", 0, fresh=True)
    rules.wait(11, "a")
    rules.join("c", 2, fresh=True)
    rules.wait(10, "a", "c")
    assert not rules.generations(), "the last call begins when enough have come"
    rules.wait(1, "a", "c")
    assert rules.generations() == [[0, 2]]
    assert rules.said == ["the run begins with groups 0, 2; others may join it later: 1"]
    rules.join("b", 1, fresh=True)
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, step=1, members=(0, 2))
    assert rules.generations() == [[0, 2], [0, 1, 2]]


def test_all_groups_begin_at_once() -> None:
    rules = Rules(min_groups=2)
    rules.begin()
    assert rules.generations() == [[0, 1, 2]]
    assert not rules.said


def test_too_few_groups_do_not_begin() -> None:
    rules = Rules(min_groups=2)
    rules.join("a", 0, fresh=True)
    rules.wait(31, "a")
    assert not rules.generations()
    assert rules.membership.failure == "only 1 of at least 2 groups came within 30 s; missing: 1, 2"


def test_the_last_call_may_end_after_the_longest_wait() -> None:
    rules = Rules(min_groups=2)
    rules.join("a", 0, fresh=True)
    rules.wait(25, "a")
    rules.join("c", 2, fresh=True)
    rules.wait(10, "a", "c")
    assert rules.membership.failure is None
    rules.wait(1, "a", "c")
    assert rules.generations() == [[0, 2]]


def test_enough_groups_begin_at_once_if_no_other_one_can_come() -> None:
    rules = Rules(min_groups=2)
    rules.membership.gone.add(1)
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, fresh=True)
    assert rules.generations() == [[0, 2]]
    rules = Rules(min_groups=2)
    rules.membership.gone.update((0, 1))
    rules.join("c", 2, fresh=True)
    assert rules.membership.failure == "group 0 was lost before the first step, and is not started again"


def test_groups_that_see_a_run_do_not_begin_it_again_without_the_others() -> None:
    """The others may train, and come to this new coordinator after a long step."""
    rules = Rules(min_groups=2)
    rules.join("b", 1, fresh=True, begun=True)
    rules.join("c", 2, fresh=True)
    rules.wait(20, "b", "c")
    assert not rules.generations()
    rules.join("a", 0, step=50, members=(0,))
    assert rules.generations() == [[0, 1, 2]]
    assert rules.membership.step == 50
    rules = Rules(min_groups=2)
    for slot, peer in enumerate("ab"):
        rules.join(peer, slot, fresh=True, begun=True)
    rules.wait(31, "a", "b")
    assert rules.membership.failure is not None
    assert "all are needed, because the directory has .begun or other files of a run" in rules.membership.failure


def test_groups_whose_reductions_fail_are_told_to_try_again() -> None:
    rules = Rules()
    rules.begin()
    vote = {"type": "vote", "generation": 1, "attempt": 0, "ok": False, "text": "timed out"}
    rules.membership.hear("b", vote)
    for slot, peer in enumerate("abc"):
        rules.join(peer, slot, members=(0, 1, 2))
    assert rules.said == [
        "groups 0, 1, 2 try again, because group 1 gave up (timed out); if this is repeated, two hosts do not reach "
        "each other, or a group is slower than the limits in the section training"
    ]
    rules.membership.hear("b", vote | {"generation": 2})
    rules.membership.lose("c", "it died")
    for slot, peer in enumerate("ab"):
        rules.join(peer, slot, members=(0, 1, 2))
    assert len(rules.said) == 1, "a loss is told otherwise"
    assert rules.generations()[-1] == [0, 1]


def test_a_vote_against_a_step_that_gives_no_reason_does_not_commit_it() -> None:
    rules = Rules()
    rules.begin()
    vote = {"type": "vote", "generation": 1, "attempt": 0, "ok": True, "facts": None}
    for peer in "ac":
        rules.membership.hear(peer, vote)
    with pytest.raises(ProtocolError):
        rules.membership.hear("b", vote | {"ok": False})
    rules.membership.lose("b", "a text that is too long, or none")
    assert not [kind for _, kind, _ in rules.sent if kind == "decision"]
    assert [peer for peer, kind, _ in rules.sent if kind == "abort"] == ["a", "c"]


NOTHING_MORE = "was lost after step 1 (it died); no step was committed after that"


def test_losses_after_which_the_run_ends_are_told_with_the_reason() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    for peer in "abc":
        rules.membership.lose(peer, "it died")
    assert rules.said == [
        *(f"group {slot} on here {NOTHING_MORE}" for slot in range(3)),
        "the run cannot go on: all groups are lost; start the run again with --resume",
    ]


def test_a_loss_after_the_last_step_is_told() -> None:
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.hear("a", {"type": "bye"})
    rules.membership.lose("b", "it died")
    rules.membership.hear("c", {"type": "bye"})
    assert rules.membership.is_finished and rules.membership.failure is None
    assert rules.said == [f"group 1 on here {NOTHING_MORE}"]


def test_groups_that_vote_for_the_end_of_the_run_have_not_gone_on() -> None:
    """They vote when their last checkpoint is written, because no living group holds some units."""
    rules = Rules()
    rules.begin()
    rules.vote()
    rules.membership.lose("b", "it died")
    for peer, slot in (("a", 0), ("c", 2)):
        rules.join(peer, slot, step=1, members=(0, 1, 2), phase=GIVE_UP)
    for peer in "ac":
        rules.membership.hear(peer, {"type": "vote", "generation": 2, "attempt": 0, "ok": True, "facts": None})
    assert rules.membership.step == 2 and not rules.said
    rules.membership.hear("a", {"type": "fail", "text": "no living group holds a unit"})
    assert rules.said == [f"group 1 on here {NOTHING_MORE}", "the run cannot go on: no living group holds a unit"]
