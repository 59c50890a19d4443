"""A holder dies while it returns, in the last message of what groups tell each other about a round.

One rank of another group has got all of the message, and the other rank of that group has not.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sdp.engine.elastic.rounds as rounds_module
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.coordination.records import STEP
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.clusters.living import DiedError, Place, begin, run_groups, world_of_group
from sdp.tests.support.clusters.rounds import BACK, EVERY, LOST, STEPS
from sdp.tests.support.ranks import RankPool
from torch.distributed import TCPStore

SAVED, LAST, AGREE = 3, 8, 0
SYNC = f'{{"every": {EVERY}, "outer_optimizer": {{"type": "SGD", "params": {{"lr": 1.0}}}}}}'


def elastic(case: Case, port: int, store_port: int, folder: str) -> int:
    """Run the case on this rank of three groups. Returns the steps when all have met again."""
    with world_of_group(case, store_port) as (place, shared):
        return _run(case, place, port, shared, Path(folder))


def _run(case: Case, place: Place, port: int, shared: TCPStore, folder: Path) -> int:
    engine, session, client, store = begin(case, place, port, "first", STEPS, folder)
    session.meet(STEP)
    try:
        while engine.global_steps < BACK:
            if place.slot == LOST and engine.global_steps == LAST:
                client.hang_up()
                shared.wait(["the others wait"])
                _die_in_the_last_message(case, place, port, folder)
                engine, session, client, store = begin(case, place, port, "third", STEPS, folder)
                session.meet(STEP)
                break
            one_step(engine, case, engine.global_steps, data_rank=place.slot * case.fsdp + place.inside)
            engine.step()
            _agree(engine, session)
            if engine.global_steps == SAVED:
                session.protect(partial(engine.save_checkpoint, folder))
                session.vote(None)
    except StepAbortedError:
        if place.inside == 0:
            shared.set("the others wait", "yes")
        with patch.object(rounds_module, "gather_json", _not_heard_by_one_rank(client, place)):
            session.meet(AGREE)
    del store
    return engine.global_steps


def _agree(engine: Any, session: Any) -> None:
    if session.rounds.is_due(is_last=False):
        with session.deferred():
            session.rounds.agree(lambda: session.vote(None), is_last=False)
        session.protect(lambda: engine.frozen_here, defers=True)
        session.vote(None)


def _die_in_the_last_message(case: Case, place: Place, port: int, folder: Path) -> None:
    """Return, and die when this rank has sent all of the last message."""
    _, session, client, store = begin(case, place, port, "second", STEPS, folder)
    gather, calls = rounds_module.gather_json, []

    def dies(value: Any) -> Any:
        calls.append(gather(value))
        if len(calls) == 2:
            time.sleep(0.5)  # so that the other ranks of this test have it, too
            raise DiedError
        return calls[-1]

    with patch.object(rounds_module, "gather_json", dies):
        try:
            session.meet(STEP)
        except DiedError:
            client.hang_up()
    del store


def _not_heard_by_one_rank(client: CoordinatorClient, place: Place) -> Any:
    """Return ``gather_json``, whose first list does not reach one rank until a group is lost."""
    gather, lists = rounds_module.gather_json, []

    def hear(value: Any) -> Any:
        found = gather(value)
        if isinstance(value, list):
            lists.append(found)
            if len(lists) == 1 and (place.slot, place.inside) == (0, 0):
                while not client.abort.is_set():
                    time.sleep(0.01)
                raise StepAbortedError("the last message was lost with its group")
        return found

    return hear


def test_the_ranks_of_a_group_leave_the_meeting_together(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(3, 2, 3, sync=SYNC, optimizer="momentum", masking="backward", placement="alone")
    assert run_groups(ranks, case, elastic, str(tmp_path)) == [BACK] * case.world
