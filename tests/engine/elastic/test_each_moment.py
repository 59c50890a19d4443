"""A group is lost at each moment of a step, and while another group returns. The others go on as a
run that has only the living groups.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sdp.engine.elastic.bringing_back as bringing_back
import torch
import torch.distributed as dist
from sdp.engine.batch.call import call_model, loss_of, target_count
from sdp.engine.distributed import world
from sdp.engine.distributed.agreement import gather_json
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.session import Session
from sdp.tests.support import models
from sdp.tests.support.cases import RELATIVE, Case, one_step
from sdp.tests.support.clusters.living import (
    DiedError,
    Place,
    begin,
    compare_weights,
    reference_among,
    run_groups,
    whole_weights,
    world_of_group,
)
from sdp.tests.support.ranks import RankPool
from torch.distributed import TCPStore

STEPS, LOST, LAST = 5, 1, 2  # group 1 is lost in the second step, or in what follows it
BACK = 3  # it returns after this step, if another group is lost then
EVALUATE, SAVE = 3, 4
COUNT = "an evaluation, before ranks agree on the number of batches"
AFTER_STEP = ("an evaluation", COUNT, "a save")
MOMENTS = ("a reduction", "before the vote", "the update", *AFTER_STEP)
RETURN = "another group returns"
ITS_RETURN = "its own return"

Found = tuple[int, list[int], dict[str, torch.Tensor]]  # step, living groups, whole weights


def die(*_: Any, **__: Any) -> Any:
    """Be lost, together with the other ranks of the group.

    Their processes live on, so a rank that came later would wait for one that is lost already.
    """
    if dist.get_world_size() > 1:
        dist.barrier()
    raise DiedError


def elastic(
    case: Case, port: int, store_port: int, moment: str, folder: str, kind: str
) -> tuple[list[Found], list[float]]:
    """Run the case on this rank of three groups.

    Returns:
        What it has after each step, and the losses that it evaluated.
    """
    with world_of_group(case, store_port) as (place, shared):
        found: list[Found] = []
        losses: list[float] = []
        client = None
        try:
            engine, session, client, store = begin(case, place, port, "first", STEPS, kind=kind)
            session.meet(STEP)
            _train(engine, session, case, place, shared, moment, Path(folder), found, losses)
        except DiedError:
            assert client is not None
            client.hang_up()
            if moment in (RETURN, ITS_RETURN) and place.slot == LOST:
                shared.wait(["the others are there"])
                if moment == ITS_RETURN:
                    _die_while_returning(case, place, port, kind)
                engine, session, client, store = begin(case, place, port, "last", STEPS, kind=kind)
                session.meet(STEP)
                _train(engine, session, case, place, shared, "", Path(folder), found, losses)
        del store
        return found, losses


def _die_while_returning(case: Case, place: Place, port: int, kind: str) -> None:
    _, session, client, store = begin(case, place, port, "second", STEPS, kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bringing_back, "exchange", die)
        with pytest.raises(DiedError):
            session.meet(STEP)
    client.hang_up()
    del store


def _train(
    engine: Any,
    session: Session,
    case: Case,
    place: Place,
    shared: TCPStore,
    moment: str,
    folder: Path,
    found: list[Found],
    losses: list[float],
) -> None:
    while engine.global_steps < STEPS:
        step = engine.global_steps + 1
        dies = place.slot == LOST and step == LAST and moment != ""
        dying = moment if dies and moment not in AFTER_STEP else ""
        _repeat(session, STEP, lambda: _step(engine, session, case), engine, dying)
        if step == LAST and moment in AFTER_STEP:
            phase, dying = (SAVE if moment == "a save" else EVALUATE), moment if dies else ""
            _repeat(session, phase, lambda: _do(engine, session, case, place, folder, moment, losses), engine, dying)
        found.append((step, _slots(session), whole_weights(engine)))
        if moment in (RETURN, ITS_RETURN) and step == BACK and place.slot != LOST:
            shared.set("the others are there", "yes")
            with pytest.MonkeyPatch.context() as patch:
                if place.slot == 2 and moment == RETURN:
                    patch.setattr(bringing_back, "exchange", die)
                while LOST not in session.meet(STEP).slots:
                    pass


def _slots(session: Session) -> list[int]:
    assert session.assembly is not None
    return session.assembly.slots


def _repeat(session: Session, phase: int, action: Callable[[], Any], engine: Any, moment: str) -> None:
    if moment == "a reduction":
        first = next(name for name in engine.layout.blocks if name not in engine.backend.stand_ins)
        engine.module.get_submodule(first).register_full_backward_pre_hook(die)  # those of later ones are under way
    elif moment == "before the vote":
        engine.before_update = die
    elif moment == "the update":
        engine.backend.update = die
    elif moment in (RETURN, ITS_RETURN):
        die()
    elif moment == COUNT:
        engine.backend.start_control = die
    elif moment:
        if engine.layout.buffers:  # batch norms: their statistics are averaged before the first batch
            engine.backend.agree_on_buffers = die
        engine.module.register_forward_pre_hook(die)
        engine.rates_of_parameters = die
    while True:
        try:
            action()
            return
        except StepAbortedError:
            engine.forget_micro_batches()
            session.meet(phase)


def _step(engine: Any, session: Session, case: Case) -> None:
    session.look()
    with session.deferred():
        one_step(engine, case, engine.global_steps, data_rank=world.rank() // case.tp)
        engine.step()


def _do(
    engine: Any, session: Session, case: Case, place: Place, folder: Path, moment: str, losses: list[float]
) -> None:
    if moment != "a save":
        batches = [models.micro_batch(case.model, 99, 0, place.slot)] * (1 + place.inside)
        before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        passes: list[int] = []
        counting = engine.module.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            loss = session.protect(lambda: engine.evaluate(batches), defers=True)
        except StepAbortedError:
            assert len(set(gather_json(len(passes), dist.group.WORLD))) == 1, "ranks of one group go on together"
            assert all(torch.equal(before[name], buffer) for name, buffer in engine.module.named_buffers())
            raise
        finally:
            counting.remove()
        losses.append(loss)
    else:
        session.protect(lambda: engine.save_checkpoint(folder))
        assert (folder / f"step-{LAST}" / "state.json").exists()


@pytest.mark.parametrize(
    ("case", "moment"),
    [
        *((Case(3, 1, 0, optimizer="adamw", masking="backward"), moment) for moment in MOMENTS),
        *(
            pytest.param(Case(3, 2, 3, model="llama-meta", clip=True), moment, marks=pytest.mark.slow)
            for moment in MOMENTS
        ),
        (Case(3, 1, 0, model="resnet-meta"), AFTER_STEP[0]),
        (Case(3, 1, 0, optimizer="adamw", placement="full"), RETURN),
        (Case(3, 2, 3, model="llama-meta", placement="full", clip=True), RETURN),
        (Case(3, 1, 0, optimizer="adamw", masking="backward"), ITS_RETURN),
        pytest.param(Case(3, 2, 3, model="llama-meta", clip=True), ITS_RETURN, marks=pytest.mark.slow),
        pytest.param(Case(3, 1, 0, tp=2, model="wide-llama-tied-meta"), "a reduction", marks=pytest.mark.slow),
        pytest.param(Case(3, 1, 0, tp=2, model="wide-llama-tied-meta"), "the update", marks=pytest.mark.slow),
        pytest.param(Case(3, 1, 0, tp=2, model="wide-llama-tied-meta"), AFTER_STEP[0], marks=pytest.mark.slow),
        pytest.param(Case(3, 1, 0, tp=2, model="wide-llama-tied-meta"), "a save", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_the_others_go_on(ranks: RankPool, tmp_path: Path, case: Case, moment: str) -> None:
    _check(ranks, tmp_path, case, moment, "fsdp2")


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(each, marks=() if each in ("a reduction", COUNT, RETURN) else pytest.mark.slow)
        for each in (*MOMENTS, RETURN)
    ],
)
def test_with_deepspeed_they_go_on_too(ranks: RankPool, tmp_path: Path, moment: str) -> None:
    placement = "full" if moment == RETURN else "mixed"
    case = Case(3, 2, 3, optimizer="adamw", masking="backward", clip=True, placement=placement)
    _check(ranks, tmp_path, case, moment, "deepspeed")


def _check(ranks: RankPool, tmp_path: Path, case: Case, moment: str, kind: str) -> None:
    answers = run_groups(ranks, case, elastic, moment, str(tmp_path), kind)
    living: list[list[int]] = [[0, 1, 2], [0, 1, 2], *([0, 2] for _ in range(STEPS - LAST))]
    if moment not in ("the update", *AFTER_STEP):
        living[1] = [0, 2]  # the step was made again
    if moment in (RETURN, ITS_RETURN):
        living[BACK:] = [[0, 1] if moment == RETURN else [0, 1, 2]] * (STEPS - BACK)
    seen, is_normed = 0, case.model.startswith("resnet")  # its statistics are recalibrated
    for step, (_, weights) in enumerate(reference_among(case, living), start=1):
        for rank, (found, losses) in enumerate(answers):
            for _, slots, mine in (each for each in found if each[0] == step):
                assert slots == living[step - 1] or step == LAST
                seen += 1
                compare_weights(case, mine, weights, f"step {step}, rank {rank}")
            if (
                step == LAST
                and rank // (case.fsdp * case.tp) != LOST
                and moment in (AFTER_STEP[0], COUNT)
                and not is_normed
            ):
                assert losses == [pytest.approx(_held_out_loss(case, weights, [0, 2]), rel=RELATIVE)]
    assert seen >= 2 * STEPS * case.fsdp * case.tp


@torch.no_grad()
def _held_out_loss(case: Case, weights: dict[str, torch.Tensor], living: list[int]) -> float:
    """Return the loss of the full model over the batches of the living groups."""
    model = models.build(case.model.removesuffix("-meta")).eval()
    model.load_state_dict(weights, strict=False)
    total = count = 0.0
    for slot in living:
        batch = models.micro_batch(case.model, 99, 0, slot)
        targets = target_count(model, batch)
        total, count = total + loss_of(call_model(model, batch)).item() * targets, count + targets
    return total / count
