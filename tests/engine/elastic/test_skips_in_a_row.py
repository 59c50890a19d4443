"""A group that returns counts the steps skipped in a row as the others do."""

from __future__ import annotations

import itertools
from typing import Any

from sdp.engine.distributed import world
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.session import Session
from sdp.engine.errors import NonFiniteError
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from sdp.tests.support.clusters.living import GROUPS, begin, run_groups, world_of_group
from sdp.tests.support.ranks import RankPool

LOST, BACK = 1, 3  # group LOST is lost after the first step, and returns before step BACK (from 0)
STEPS = 100  # more than the run makes
AGREE = 0  # what comes next for a rank whose round is over


def skipping(case: Case, port: int, store_port: int) -> tuple[int, tuple[int, int]]:
    """Skip all steps but the first one, in three groups of one rank.

    Return the step in which the run ended, and how many were skipped in a row when the group was
    back.
    """
    with world_of_group(case, store_port) as (place, shared):
        engine, session, client, store = begin(case, place, port, "first", STEPS)
        session.meet(STEP)
        _step(engine, session, case, 0)
        if place.slot == LOST:
            client.hang_up()
            shared.wait(["the others are there"])
            engine, session, client, store = begin(case, place, port, "second", STEPS)
            session.meet(STEP)
        else:
            for step in range(1, BACK):
                _step(engine, session, case, step)
            shared.set("the others are there", "yes")
            while len(session.meet(STEP).members) < GROUPS:
                pass
        in_a_row = engine.last_steps.skipped_in_a_row
        for step in itertools.count(BACK):
            try:
                _step(engine, session, case, step)
            except NonFiniteError:
                del store
                return step, in_a_row
    raise AssertionError("it goes on for ever")


def _step(engine: Any, session: Session, case: Case, step: int) -> None:
    """Make a step, again if a group is lost meanwhile. Only the first one has a finite loss."""
    factor = float("nan") if step else 1.0
    while True:
        try:
            session.look()
            with session.deferred():
                loss = engine(models.micro_batch(case.model, step, 0, world.rank()))
                engine.backward(loss * factor)
                engine.step()
        except StepAbortedError:
            engine.forget_micro_batches()
            session.meet(STEP)
        else:
            return


def test_all_groups_end_in_the_same_step(ranks: RankPool) -> None:
    answers = run_groups(ranks, Case(3, 1), skipping)
    (ended,) = {step for step, _ in answers}
    assert ended > BACK
    assert [in_a_row for _, in_a_row in answers] == [(BACK - 1, 0)] * GROUPS


def skipping_in_rounds(case: Case, port: int, store_port: int) -> tuple[int, bool, tuple[int, int]]:
    """Make two rounds of two steps, of which the last step is skipped. A group returns after it.

    Return how many steps were skipped, whether the last one was, and how many in a row.
    """
    with world_of_group(case, store_port) as (place, shared):
        engine, session, client, store = begin(case, place, port, "first", STEPS)
        session.meet(STEP)
        for step in range(4):
            if place.slot == LOST and step == 2:
                client.hang_up()
                shared.wait(["the others are there"])
                engine, session, client, store = begin(case, place, port, "second", STEPS)
                session.meet(STEP)
                break
            _local_step(engine, session, case, place.slot)
        else:
            shared.set("the others are there", "yes")
            while len(session.meet(STEP).members) < GROUPS:
                pass
        found = engine.skipped_steps, engine.was_step_skipped, engine.last_steps.skipped_in_a_row
        shared.set(f"group {place.slot} is done", "yes")
        shared.wait([f"group {slot} is done" for slot in range(GROUPS)])
        del store
        return found


def _local_step(engine: Any, session: Session, case: Case, slot: int) -> None:
    """Make a step of this group, and agree with the others if the round ends."""
    rounds, step = session.rounds, engine.global_steps
    assert rounds is not None
    loss = engine(models.micro_batch(case.model, step, 0, slot))
    engine.backward(loss * (float("nan") if step == 3 else 1.0))
    engine.step()
    while rounds.is_due(is_last=False):
        try:
            with session.deferred():
                rounds.agree(lambda: session.vote(None), is_last=False)
        except StepAbortedError:
            session.meet(AGREE)


def test_all_groups_count_alike_in_rounds(ranks: RankPool) -> None:
    answers = run_groups(ranks, Case(3, 1, sync='{"every": 2}'), skipping_in_rounds)
    assert answers == [(1, True, (1, 0))] * GROUPS
