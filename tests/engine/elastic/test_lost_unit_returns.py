"""Averages in every step: the only holder of a unit is lost. The others wait for it, and it brings
the unit back from a checkpoint. Everything else has the state of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.distributed import world
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.session import Session
from sdp.engine.placement.units import Slice
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.clusters.living import (
    GROUPS,
    Place,
    Seen,
    begin,
    compare,
    compare_weights,
    cut,
    engine_among,
    holders_among,
    look,
    run_groups,
    units_of,
    world_of_group,
)
from sdp.tests.support.ranks import RankPool
from torch.distributed import TCPStore

LOST = 1  # the group, which holds a unit alone
SAVED, LAST, STEPS = 2, 4, 7  # the step of the checkpoint, the last one of the lost group, and of the run

Weights = dict[str, torch.Tensor]


# -- the elastic run, on ranks ---------------------------------------------------------------------


def elastic(case: Case, port: int, store_port: int, folder: str, kind: str) -> list[dict[str, Any]]:
    """Run the case on this rank of three groups.

    Returns:
        The attributes of :class:`Seen` after each step, and of the lost group also when it is back.
    """
    with world_of_group(case, store_port) as (place, shared):
        return [vars(seen) for seen in _run(case, place, port, shared, Path(folder), kind)]


def _run(case: Case, place: Place, port: int, shared: TCPStore, folder: Path, kind: str) -> list[Seen]:
    engine, session, client, store = begin(case, place, port, "first", STEPS, folder, kind)
    seen: list[Seen] = []
    session.meet(STEP)
    while engine.global_steps < STEPS:
        if place.slot == LOST and engine.global_steps == LAST and client.identity.life.startswith("first"):
            shared.wait([_has_looked(slot, inside) for slot in range(GROUPS) for inside in range(place.ranks)])
            client.hang_up()
            shared.wait(["the others wait"])
            engine, session, client, store = begin(case, place, port, "second", STEPS, folder, kind)
            session.meet(STEP)
            assert engine.global_steps == LAST
            assert session.has_lost_units
            seen.append(look(engine, session, LAST - 1))
        _step(engine, session, case, place, shared)
        seen.append(look(engine, session, engine.global_steps - 1))
        if engine.global_steps == LAST:
            shared.set(_has_looked(place.slot, place.inside), "yes")
        if engine.global_steps == SAVED:
            session.protect(partial(engine.save_checkpoint, folder))
            session.vote(None)
    del store
    return seen


def _has_looked(slot: int, inside: int) -> str:
    return f"{slot}, {inside} has looked at the last step before the loss"


def _step(engine: Any, session: Session, case: Case, place: Place, shared: TCPStore) -> None:
    """Make a step, again if the group is lost meanwhile."""
    step = engine.global_steps
    while True:
        engine.traffic.reset()
        try:
            with session.deferred():
                one_step(engine, case, step, data_rank=world.rank() // case.tp)
                engine.step()
        except StepAbortedError:
            engine.forget_micro_batches()
            if place.inside == 0:
                shared.set("the others wait", "yes")
            session.meet(STEP)
            assert session.has_lost_units
        else:
            assert engine.global_steps == step + 1
            return


# -- the reference ---------------------------------------------------------------------------------


def reference(case: Case) -> Iterator[tuple[float, Weights, Weights]]:
    """Yield the norm and the weights after each step, and the weights with which the next one
    begins.
    """
    case = replace(case, stage=0, tp=1)
    engine = engine_among(case, range(GROUPS), "reference", STEPS)
    saved: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for step in range(1, STEPS + 1):
        one_step(engine, case, step - 1, data_rank=None)
        engine.step()
        norm, after = engine.get_global_grad_norm(), _weights(engine)
        if step == SAVED:
            saved = [_part_of_state(engine, part) for part in lost_parts(case)]
        if step == LAST:
            for part, state in zip(lost_parts(case), saved, strict=True):
                _put_back(engine, part, *state)
        yield norm, after, _weights(engine)


def lost_parts(case: Case) -> list[Slice]:
    """Return the parameters, or slices of them, that no other group holds."""
    holders = holders_among(case, range(GROUPS))
    parts = [part for unit in units_of(case) if holders[unit.name] == [LOST] for part in unit.slices]
    assert parts
    return parts


def _weights(engine: Any) -> Weights:
    return {name: p.detach().clone() for name, p in engine.parameters_here.items()}


def _part_of_state(engine: Any, part: Slice) -> tuple[torch.Tensor, dict[str, Any]]:
    weight = engine.parameters_here[part.parameter]
    state = engine.optimizer.state[weight]
    assert part.dim is None or "step" not in state  # a slice would have a number of steps of its own
    return cut(weight.detach(), part).clone(), {key: cut(value, part).clone() for key, value in state.items()}


@torch.no_grad()
def _put_back(engine: Any, part: Slice, weight: torch.Tensor, state: dict[str, Any]) -> None:
    whole = engine.parameters_here[part.parameter]
    for full, saved in [(whole, weight), *((engine.optimizer.state[whole][key], each) for key, each in state.items())]:
        assert not torch.equal(cut(full, part), saved)  # otherwise nothing was to be brought back
        if part.dim is None:
            full.copy_(saved)
            continue
        pieces = saved.split([end - start for start, end in part.ranges], part.dim)
        for (start, end), piece in zip(part.ranges, pieces, strict=True):
            full.narrow(part.dim, start, end - start).copy_(piece)


# -- the tests -------------------------------------------------------------------------------------


def _slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


CASES = [
    Case(3, 1, 0, optimizer="momentum", clip=True, placement="alone"),
    Case(3, 2, 3, optimizer="adamw", masking="backward", placement="alone"),
    _slow(
        Case(
            3,
            1,
            0,
            masking="backward",
            model="even-llama-tied-meta",
            neurons=2,
            optimizer="momentum",
            placement="alone",
        )
    ),
    _slow(Case(3, 1, 0, tp=2, model="wide-llama-tied-meta", optimizer="momentum", clip=True, placement="alone")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).replace(" ", "-"))
def test_the_holder_brings_the_unit_back_and_has_the_rest_from_the_others(
    ranks: RankPool, tmp_path: Path, case: Case
) -> None:
    check(ranks, tmp_path, case, "fsdp2")


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 0, optimizer="momentum", placement="alone"),
        _slow(Case(3, 2, 3, optimizer="momentum", masking="backward", placement="alone")),
    ],
    ids=lambda case: str(case).replace(" ", "-"),
)
def test_with_deepspeed_it_does_so_too(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    check(ranks, tmp_path, case, "deepspeed")


def check(ranks: RankPool, tmp_path: Path, case: Case, kind: str) -> None:
    told = run_groups(ranks, case, elastic, str(tmp_path), kind)
    answers = [[Seen(**values) for values in of_rank] for of_rank in told]
    per_group = case.fsdp * case.tp
    back = {rank: answer.pop(LAST) for rank, answer in enumerate(answers) if rank // per_group == LOST}
    for step, (norm, after, before_next) in enumerate(reference(case), 1):
        everyones = {rank: answer[step - 1] for rank, answer in enumerate(answers)}
        assert {tuple(seen.living) for seen in everyones.values()} == {(0, 1, 2)}
        compare(case, everyones, norm, after, f"step {step}", is_steady=step != LAST)
        if step == LAST:
            for rank, seen in back.items():
                compare_weights(case, seen.weights, before_next, f"rank {rank} is back")
