"""A group is lost and returns. In each step the others equal a run that has only the living groups,
and holders and frozen copies are equal bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sdp.engine.distributed import world
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.session import Session
from sdp.tests.support.case_tables import THERE_AND_BACK, TO_BACKWARD, TO_FORWARD
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.clusters.living import (
    DiedError,
    Place,
    Seen,
    begin,
    compare,
    look,
    reference_among,
    run_groups,
    world_of_group,
)
from sdp.tests.support.ranks import RankPool
from torch.distributed import TCPStore

LOST = 1  # the group
# The living groups in each step. The group is lost amid the end of the second step.
LIVING = [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]


# -- the elastic run, on ranks ---------------------------------------------------------------------


def elastic(case: Case, port: int, store_port: int, kind: str) -> list[dict[str, Any]]:
    """Run the case on this rank of three groups, which each have a world of their own, with a
    ``kind`` of engine.

    Returns:
        The attributes of :class:`Seen` after each step.
    """
    with world_of_group(case, store_port) as (place, shared):
        return [vars(seen) for seen in _run(case, place, port, shared, kind)]


def _run(case: Case, place: Place, port: int, shared: TCPStore, kind: str) -> list[Seen]:
    engine, session, client, store = begin(case, place, port, "first", len(LIVING), kind=kind)
    seen: list[Seen] = []
    session.meet(STEP)
    is_lost = place.slot == LOST
    for step, living in enumerate(LIVING):
        if is_lost and LOST not in living:
            continue
        if is_lost and step and LOST not in LIVING[step - 1]:
            shared.wait(["the others are there"])
            engine, session, client, store = begin(case, place, port, "second", len(LIVING), kind=kind)
            session.meet(STEP)
            assert engine.global_steps == step
        elif step and len(living) > len(LIVING[step - 1]):
            shared.set("the others are there", "yes")
            while len(session.meet(STEP).members) < len(living):
                pass
        dies = is_lost and step + 1 < len(LIVING) and LOST not in LIVING[step + 1]
        try:
            _step(engine, session, case, step, dies=dies)
        except DiedError:
            client.hang_up()
            continue
        seen.append(look(engine, session, step))
    del store
    return seen


def _step(engine: Any, session: Session, case: Case, step: int, *, dies: bool) -> None:
    """Make a step, again if a group is lost meanwhile."""
    if dies:  # after the vote, when the weights have changed, before they are sent

        def die(**_: Any) -> None:
            raise DiedError

        engine.backend.refresh = die
    while True:
        engine.traffic.reset()
        try:
            session.look()
            with session.deferred():
                one_step(engine, case, step, data_rank=world.rank() // case.tp)
                engine.step()
        except StepAbortedError:
            engine.forget_micro_batches()
            session.meet(STEP)
        else:
            assert engine.global_steps == step + 1
            return


CASES = [
    Case(3, 1, 0, masking="backward", optimizer="adamw", model="llama-tied-meta", clip=True),
    Case(3, 1, 0, accumulation=2, model="mlp-meta", clip=True, branch_scale="train", optimizer="momentum"),
    Case(3, 1, 0, masking="backward", model="even-llama-tied-meta", neurons=2, optimizer="adamw"),
    Case(3, 1, 0, masking=THERE_AND_BACK, model="mlp-meta", optimizer="adamw"),
    Case(3, 1, 0, masking=TO_BACKWARD, model="even-llama-meta", neurons=2, branch_scale="train"),
    Case(3, 2, 3, masking="backward", model="llama-meta", optimizer="adamw", clip=True),
    Case(3, 2, 2, 2, masking=TO_FORWARD, model="llama-meta", optimizer="adamw", branch_scale="train"),
    Case(3, 1, 0, tp=2, model="wide-llama-tied-meta", optimizer="adamw", clip=True),
    Case(3, 1, 0, tp=2, masking="backward", model="wide-llama-meta", neurons=2, optimizer="adamw"),
    Case(3, 2, 0, accumulation=2, masking="backward", model="mlp-meta", clip=True, optimizer="momentum"),
    Case(3, 2, 1, model="llama-meta", optimizer="adamw", clip=True),
    Case(3, 1, 0, masking="backward", model="llama-tied-meta", bf16=True, clip=True),
    Case(3, 1, 0, model="llama-tied-meta", optimizer="adamw", lr_scale="0.5"),
]


def _slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


DEEPSPEED_CASES = [
    Case(3, 1, 0, masking="backward", optimizer="adamw", model="llama-tied-meta", clip=True),
    _slow(Case(3, 2, 0, accumulation=2, model="mlp-meta", clip=True, optimizer="momentum")),
    Case(3, 2, 1, masking=TO_BACKWARD, model="even-llama-meta", neurons=2, optimizer="adamw"),
    _slow(Case(3, 2, 2, accumulation=2, masking="backward", model="llama-tied-meta", optimizer="adamw", clip=True)),
    _slow(Case(3, 1, 3, accumulation=2, model="mlp-meta", clip=True, optimizer="momentum")),
    Case(3, 2, 3, masking="backward", model="llama-meta", optimizer="adamw", clip=True),
    _slow(Case(3, 2, 3, masking=THERE_AND_BACK, model="even-llama-tied-meta", neurons=2, optimizer="adamw")),
]


def _id(case: Case) -> str:
    schedule = "" if case.masking.isalpha() else "-".join(each["masking"] for each in json.loads(case.masking))
    return f"{replace(case, placement='mixed')}-{schedule}"


@pytest.mark.parametrize(
    "case", [_slow(case) if index in (2, 4, 7) or index > 8 else case for index, case in enumerate(CASES)], ids=_id
)
def test_a_lost_and_a_returning_group_leave_a_run_of_the_living_groups(ranks: RankPool, case: Case) -> None:
    _check(ranks, case, "fsdp2")


@pytest.mark.parametrize("case", DEEPSPEED_CASES, ids=_id)
def test_so_they_do_with_deepspeed(ranks: RankPool, case: Case) -> None:
    _check(ranks, case, "deepspeed")


def _check(ranks: RankPool, case: Case, kind: str) -> None:
    told = run_groups(ranks, case, elastic, kind)
    answers = [[Seen(**values) for values in of_rank] for of_rank in told]
    per_group = case.fsdp * case.tp
    for step, (norm, weights) in enumerate(reference_among(case, LIVING)):
        everyones: dict[int, Seen] = {}
        for rank, answer in enumerate(answers):
            found = _at(answer, rank // per_group, step)
            if found is not None:
                everyones[rank] = found
        is_steady = step + 1 < len(LIVING) and LIVING[step + 1] == LIVING[step]
        compare(case, everyones, norm, weights, f"step {step}", is_steady=is_steady)


def _at(answer: list[Seen], slot: int, step: int) -> Seen | None:
    """Return what a rank saw after a step. The lost group does not see the one in which it dies."""
    if slot != LOST:
        return answer[step]
    alive = [index for index, living in enumerate(LIVING) if LOST in living and LOST in LIVING[min(index + 1, 5)]]
    return answer[alive.index(step)] if step in alive else None
