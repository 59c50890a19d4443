"""Local steps with elastic groups: a group is lost in a round and returns. The anchors equal a
computation in plain torch with the same living holders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.session import Session
from sdp.tests.support import models
from sdp.tests.support.cases import RELATIVE, Case, one_step
from sdp.tests.support.clusters.living import DiedError, Place, begin, run_groups, world_of_group
from sdp.tests.support.clusters.rounds import (
    BACK,
    EVERY,
    LOST,
    STEPS,
    Loop,
    Seen,
    compare,
    compare_holders,
    look,
    rates_of,
)
from sdp.tests.support.ranks import RankPool
from torch.distributed import TCPStore

LAST = 5  # the last step that the lost group makes: the second of a round, or the end of one
AGREE, COPY, INNER = 0, 1, 5
PLAIN = '{"type": "SGD", "params": {"lr": 1.0}}'
ADAM = '{"type": "AdamW", "params": {"lr": 0.05}}'


# -- the elastic run, on ranks ---------------------------------------------------------------------


def elastic(case: Case, port: int, store_port: int, dies: str, kind: str) -> list[dict[str, Any]]:
    """Run the case on this rank of three groups, which each have a world of their own.

    Args:
        case: the case.
        port: that of the coordinator.
        store_port: that of a store of all ranks.
        dies: where the group is lost: "in a step", "before the vote" or "after the vote".
        kind: that of the engine.
    """
    with world_of_group(case, store_port) as (place, shared):
        return [vars(seen) for seen in _run(case, place, port, shared, dies, kind)]


def _run(case: Case, place: Place, port: int, shared: TCPStore, dies: str, kind: str) -> list[Seen]:
    engine, session, client, store = begin(case, place, port, "first", STEPS, kind=kind)
    seen: list[Seen] = []
    updates: list[Any] = []  # of the steps of the present round
    session.meet(STEP)
    last = LAST if dies == "in a step" else LAST // EVERY * EVERY + EVERY
    try:
        while engine.global_steps < STEPS:
            if place.slot == LOST and engine.global_steps == last and "vote" not in dies:
                raise DiedError
            dies_now = dies if place.slot == LOST and engine.global_steps + 1 == last else ""
            _step(engine, session, case, place, seen, updates, dies_now)
            if engine.global_steps == BACK and place.slot != LOST:
                shared.set("the others are there", "yes")
                while len(session.meet(STEP).members) < 3:
                    pass
    except DiedError:
        client.hang_up()
        updates.clear()
        shared.wait(["the others are there"])
        engine, session, client, store = begin(case, place, port, "second", STEPS, kind=kind)
        session.meet(STEP)
        assert engine.global_steps == BACK
        while engine.global_steps < STEPS:
            _step(engine, session, case, place, seen, updates, "")
    del store
    return seen


def _step(
    engine: Any, session: Session, case: Case, place: Place, seen: list[Seen], updates: list[Any], dies: str
) -> None:
    """Make a step, and agree with the other groups if a round ends."""
    rounds = session.rounds
    assert rounds is not None
    one_step(engine, case, engine.global_steps, data_rank=place.slot * case.fsdp + place.inside // case.tp)
    engine.step()
    updates.append(engine.local_training.pending)
    if not rounds.is_due(is_last=engine.global_steps == STEPS):
        return

    def commit() -> None:
        if dies == "before the vote":
            raise DiedError
        session.vote(None)
        if dies == "after the vote":
            raise DiedError

    def agree() -> None:
        with session.deferred():
            rounds.agree(commit, is_last=engine.global_steps == STEPS)

    def copies() -> None:
        session.protect(lambda: engine.frozen_here, defers=True)
        session.vote(None)

    for phase, action in ((AGREE, agree), (COPY, copies)):
        _until_committed(engine, session, phase, action)
    seen.append(look(engine, session, [update.wait().loss for update in updates]))
    updates.clear()


def _until_committed(engine: Any, session: Session, phase: int, action: Callable[[], None]) -> None:
    rounds = session.rounds
    assert rounds is not None
    while True:
        try:
            action()
            return
        except StepAbortedError:
            before = session.assembly
            now = session.meet(phase)
            assert before is not None
            rounds.note_losses(before.slots, now.slots, engine.train_batch_size() // len(now.slots))


class LossLoop(Loop):
    """A group is lost at one of its steps, and returns later.

    Args:
        case: see :class:`Loop`.
        rates: as there.
        dies: see :func:`elastic`.
    """

    def __init__(self, case: Case, rates: list[float], dies: str):
        super().__init__(case, rates)
        self._dies = dies

    def steps_of(self, group: int, step: int) -> bool:
        last = LAST if self._dies == "in a step" else LAST // EVERY * EVERY + EVERY
        return group != LOST or step <= last or step > BACK

    def counts(self, group: int, step: int) -> bool:
        if group == LOST and self._dies != "after the vote" and step == LAST // EVERY * EVERY + EVERY:
            return False
        return self.steps_of(group, step)


CASES = [
    (Case(3, 1, 0, sync=f'{{"every": {EVERY}}}', clip=True), "in a step"),
    (Case(3, 1, 0, sync=f'{{"every": {EVERY}}}', optimizer="adamw", masking="backward"), "in a step"),
    (Case(3, 1, 0, 2, sync=f'{{"every": {EVERY}}}', optimizer="adamw", clip=True), "before the vote"),
    (
        Case(3, 1, 0, sync=f'{{"every": {EVERY}, "outer_optimizer": {PLAIN}}}', optimizer="momentum"),
        "before the vote",
    ),
    (Case(3, 1, 0, sync=f'{{"every": {EVERY}}}', optimizer="adamw", masking="backward"), "after the vote"),
    pytest.param(
        Case(3, 2, 3, sync=f'{{"every": {EVERY}, "outer_optimizer": {ADAM}}}', optimizer="adamw", clip=True),
        "in a step",
        marks=pytest.mark.slow,
    ),
    (
        Case(3, 2, sync=f'{{"every": {EVERY}, "outer_optimizer": {PLAIN}}}', optimizer="momentum", masking="backward"),
        "before the vote",
    ),
]


DEEPSPEED_CASES = [
    (Case(3, 1, 0, sync=f'{{"every": {EVERY}}}', optimizer="adamw", masking="backward"), "before the vote"),
    pytest.param(
        Case(3, 2, 1, 2, sync=f'{{"every": {EVERY}}}', optimizer="momentum", clip=True),
        "in a step",
        marks=pytest.mark.slow,
    ),
    (
        Case(3, 2, 3, sync=f'{{"every": {EVERY}, "outer_optimizer": {ADAM}}}', optimizer="adamw", masking="backward"),
        "in a step",
    ),
]


@pytest.mark.parametrize(("case", "dies"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_rounds_with_a_loss_equal_plain_torch(ranks: RankPool, case: Case, dies: str) -> None:
    _check(ranks, case, dies, "fsdp2")


@pytest.mark.parametrize(("case", "dies"), DEEPSPEED_CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_with_deepspeed_they_do_so_too(ranks: RankPool, case: Case, dies: str) -> None:
    _check(ranks, case, dies, "deepspeed")


def _check(ranks: RankPool, case: Case, dies: str, kind: str) -> None:
    told = run_groups(ranks, case, elastic, dies, kind)
    answers = [{seen["step"]: Seen(**seen) for seen in of_rank} for of_rank in told]
    start = {name: p.detach() for name, p in models.build(case.model).named_parameters()}
    for step, (anchors, losses) in LossLoop(case, rates_of(case), dies).run().items():
        seen = {rank: answer[step] for rank, answer in enumerate(answers) if step in answer}
        slots = sorted({rank // (case.fsdp * case.tp) for rank in seen})
        end = LAST // EVERY * EVERY + EVERY
        assert slots == ([0, 2] if end <= step <= BACK else [0, 1, 2])
        for rank, one in seen.items():
            compare(one, anchors, start, f"step {step}, rank {rank}")
            assert one.losses == pytest.approx(losses, rel=RELATIVE)
        compare_holders(seen, case.fsdp * case.tp, step)
        after = dies != "after the vote" and step >= end
        alone = EVERY * 2 * case.accumulation * case.fsdp
        assert {one.skipped_samples for one in seen.values()} == {alone if after else 0}
