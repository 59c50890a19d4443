"""Local steps with elastic groups: the only holder of a unit is lost in a round. The others give
the round up and wait for it, and it brings the unit back from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sdp.engine.elastic.session as session_module
import torch
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

SAVED, LAST = 3, 8  # the step of the checkpoint, and the last one of the lost group
AGREE = 0


def elastic(case: Case, port: int, store_port: int, folder: str, dies_again: bool, kind: str) -> list[dict[str, Any]]:
    """Run the case on this rank of three groups. Returns what it has after each outer step."""
    with world_of_group(case, store_port) as (place, shared):
        return [vars(seen) for seen in _run(case, place, port, shared, Path(folder), dies_again, kind)]


def _run(
    case: Case, place: Place, port: int, shared: TCPStore, folder: Path, dies_again: bool, kind: str
) -> list[Seen]:
    engine, session, client, store = begin(case, place, port, "first", STEPS, folder, kind)
    seen: list[Seen] = []
    updates: list[Any] = []
    session.meet(STEP)
    try:
        while engine.global_steps < STEPS:
            if place.slot == LOST and engine.global_steps == LAST:
                raise DiedError
            _step(engine, session, case, place, seen, updates, shared)
            if engine.global_steps == SAVED:
                session.protect(lambda: engine.save_checkpoint(folder))
                session.vote(None)
    except DiedError:
        client.hang_up()
        updates.clear()
        shared.wait(["the others wait"])
        if dies_again:
            _die_while_returning(case, place, port, folder, kind)
        engine, session, client, store = begin(case, place, port, "second", STEPS, folder, kind)
        session.meet(STEP)
        assert engine.global_steps == BACK
        assert session.has_lost_units
        seen.append(look(engine, session, []))
        while engine.global_steps < STEPS:
            _step(engine, session, case, place, seen, updates, shared)
    del store
    return seen


def _die_while_returning(case: Case, place: Place, port: int, folder: Path, kind: str) -> None:
    """Return, and die when the others have told each other about the round."""
    _, session, client, store = begin(case, place, port, "a short life", STEPS, folder, kind)
    with patch.object(session_module, "load_lost_units", side_effect=DiedError), pytest.raises(DiedError):
        session.meet(STEP)
    client.hang_up()
    del store


def _step(
    engine: Any, session: Session, case: Case, place: Place, seen: list[Seen], updates: list[Any], shared: TCPStore
) -> None:
    """Make a step, and agree with the other groups if a round ends."""
    rounds = session.rounds
    assert rounds is not None
    one_step(engine, case, engine.global_steps, data_rank=place.slot * case.fsdp + place.inside // case.tp)
    engine.step()
    updates.append(engine.local_training.pending)
    is_last = engine.global_steps == STEPS
    if not rounds.is_due(is_last=is_last):
        return
    try:
        with session.deferred():
            rounds.agree(lambda: session.vote(None), is_last=is_last)
        session.protect(lambda: engine.frozen_here, defers=True)
        session.vote(None)
    except StepAbortedError:
        assert engine.global_steps == BACK
        session.rows = lambda: [[place.slot, step] for step in range(rounds.untold)]
        if place.inside == 0:
            shared.set("the others wait", "yes")
        session.meet(AGREE)
        assert session.has_lost_units
        living = [slot for slot in range(3) if slot != LOST for _ in range(place.ranks)]
        assert rounds.told == [[[slot, step] for step in range(EVERY)] for slot in living]
        assert rounds.untold == rounds.steps_alone == 0
    seen.append(look(engine, session, [update.wait().loss for update in updates]))
    updates.clear()


class GivenUpLoop(Loop):
    """A round is given up, after which the lost group is back."""

    def steps_of(self, group: int, step: int) -> bool:
        return group != LOST or not LAST < step <= BACK

    def counts(self, group: int, step: int) -> bool:
        return group != LOST or step != BACK

    def is_lost(self, name: str) -> bool:
        return self.holders_of(name) == [LOST]

    @torch.no_grad()
    def average(self, step: int) -> None:
        mine = dict(self.models[LOST].named_parameters())
        if step != BACK:
            super().average(step)
            if step == SAVED:
                lost = [name for name in self.anchors if self.is_lost(name)]
                self.saved = {name: self.anchors[name].clone() for name in lost}
                self.outer_state = {name: _copied(self.outer.state[self.anchors[name]]) for name in lost}
                self.moments = {name: _copied(self.optimizers[LOST].state[mine[name]]) for name in lost}
            return
        for name, anchor in self.anchors.items():
            if self.is_lost(name):
                anchor.copy_(self.saved[name])
                self.outer.state[anchor] = self.outer_state[name]
            for group in self.holders_of(name):
                dict(self.models[group].named_parameters())[name].copy_(anchor)

    def give_back(self) -> None:
        super().give_back()
        mine = dict(self.models[LOST].named_parameters())
        for name, state in self.moments.items():
            self.optimizers[LOST].state[mine[name]] = state


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


SYNC = f'{{"every": {EVERY}}}'
PLAIN = f'{{"every": {EVERY}, "outer_optimizer": {{"type": "SGD", "params": {{"lr": 1.0}}}}}}'
CASES = [
    Case(3, 1, 0, sync=SYNC, optimizer="adamw", clip=True, placement="alone"),
    Case(3, 2, 3, sync=PLAIN, optimizer="momentum", masking="backward", placement="alone"),
    pytest.param(Case(3, 1, 0, sync=SYNC, clip=True, masking="backward", placement="alone"), marks=pytest.mark.slow),
    pytest.param(Case(3, 2, 2, 2, sync=SYNC, optimizer="adamw", placement="alone"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).replace(" ", "-"))
def test_a_round_that_is_given_up_equals_plain_torch(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    check(ranks, tmp_path, case, dies_again=False)


@pytest.mark.parametrize(
    "case",
    [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow)],
    ids=lambda case: str(case).replace(" ", "-"),
)
def test_the_holder_may_die_again_while_it_returns(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    check(ranks, tmp_path, case, dies_again=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 0, sync=SYNC, optimizer="adamw", masking="backward", placement="alone"),
        pytest.param(Case(3, 2, 2, sync=SYNC, optimizer="adamw", clip=True, placement="alone"), marks=pytest.mark.slow),
    ],
    ids=lambda case: str(case).replace(" ", "-"),
)
def test_with_deepspeed_it_does_so_too(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    check(ranks, tmp_path, case, dies_again=True, kind="deepspeed")


def check(ranks: RankPool, tmp_path: Path, case: Case, *, dies_again: bool, kind: str = "fsdp2") -> None:
    told = run_groups(ranks, case, elastic, str(tmp_path), dies_again, kind)
    answers = [{seen["step"]: Seen(**seen) for seen in of_rank} for of_rank in told]
    start = {name: p.detach() for name, p in models.build(case.model).named_parameters()}
    per_group = case.fsdp * case.tp
    for step, (anchors, losses) in GivenUpLoop(case, rates_of(case)).run().items():
        seen = {rank: answer[step] for rank, answer in enumerate(answers)}
        for rank, one in seen.items():
            compare(one, anchors, start, f"step {step}, rank {rank}")
            if step != BACK or rank // per_group != LOST:
                assert one.losses == pytest.approx(losses, rel=RELATIVE)
        compare_holders(seen, per_group, step)
        skipped = 3 * EVERY * 2 * case.accumulation * case.fsdp if step >= BACK else 0
        assert {one.skipped_samples for one in seen.values()} == {skipped}
