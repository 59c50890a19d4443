"""Local steps with elastic groups: a group is lost in a round and returns. The anchors equal a
computation in plain torch with the same living holders.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sdp.engine.elastic.coordination.member import StepAbortedError
from sdp.engine.elastic.coordination.membership import STEP
from sdp.engine.elastic.session import Session
from sdp.tests.support import models
from sdp.tests.support.cases import RELATIVE, Case, engine_of, one_step
from sdp.tests.support.clusters.living import (
    DiedError,
    Place,
    begin,
    holders_among,
    part_of,
    run_groups,
    world_of_group,
)
from sdp.tests.support.ranks import RankPool
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

EVERY, STEPS, LOST = 3, 15, 1
LAST = 5  # the last step that the lost group makes: the second of a round, or the end of one
BACK = 9  # it returns after this step
AGREE, COPY, INNER = 0, 1, 5
PLAIN = '{"type": "SGD", "params": {"lr": 1.0}}'
ADAM = '{"type": "AdamW", "params": {"lr": 0.05}}'


@dataclass
class Seen:
    """What a rank has after an outer step."""

    step: int
    living: list[int]
    anchors: dict[str, torch.Tensor]  # this rank's parts
    full: dict[str, torch.Tensor]  # whole anchors
    outer: dict[str, dict[str, torch.Tensor]]  # the outer optimizer's state
    copies: dict[str, torch.Tensor]
    losses: list[float]  # of the steps since the last one, over all groups
    skipped_samples: int


# -- the elastic run, on ranks ---------------------------------------------------------------------


def elastic(case: Case, port: int, store_port: int, dies: str) -> list[dict[str, Any]]:
    """Run the case on this rank of three groups, which each have a world of their own.

    Args:
        case: the case.
        port: that of the coordinator.
        store_port: that of a store of all ranks.
        dies: where the group is lost: "in a step", "before the vote" or "after the vote".
    """
    with world_of_group(case, store_port) as (place, shared):
        return [vars(seen) for seen in _run(case, place, port, shared, dies)]


def _run(case: Case, place: Place, port: int, shared: TCPStore, dies: str) -> list[Seen]:
    engine, session, client, store = begin(case, place, port, "first", STEPS)
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
        engine, session, client, store = begin(case, place, port, "second", STEPS)
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
    seen.append(_look(engine, session, [update.wait().loss for update in updates]))
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


def _look(engine: Any, session: Session, losses: list[float]) -> Seen:
    assert session.assembly is not None
    local = engine.backend.local
    outer = local.outer
    with local.anchored():
        full = {name: _whole(p) for name, p in engine.parameters_here.items()}
    return Seen(
        engine.global_steps,
        session.assembly.slots,
        {name: anchor.detach().clone() for name, anchor in outer.anchors.items()},
        full,
        {name: _state(outer.optimizer.state.get(anchor, {})) for name, anchor in outer.anchors.items()},
        {name: part_of(p) for name, p in engine.frozen_here.items()},
        losses,
        engine.local_training.skipped_samples,
    )


def _state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items() if value is not None}


def _whole(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


# -- the same in plain torch -----------------------------------------------------------------------


class Loop:
    """Local steps of the MLP: a model, an optimizer and rows for each group, one by one."""

    def __init__(self, case: Case, dies: str, rates: list[float]):
        self.case, self.sync, self.dies = case, json.loads(case.sync), dies
        self.holders = holders_among(case, range(3))
        model = models.build(case.model)
        self.anchors = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        config = replace(case, placement="full").config()
        settings = config["optimizer"]
        self.kind, self.params = getattr(torch.optim, settings["type"]), settings["params"]
        self.clip, self.rates = config["gradient_clipping"], rates
        self.models = [models.build(case.model) for _ in range(3)]
        self.optimizers = [self.kind(each.parameters(), **self.params) for each in self.models]
        outer = self.sync.get("outer_optimizer") or {
            "type": "SGD",
            "params": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        }
        self.outer = getattr(torch.optim, outer["type"])(self.anchors.values(), **outer["params"])

    def steps_of(self, group: int, step: int) -> bool:
        """Whether a group makes the step, which counts from 1."""
        last = LAST if self.dies == "in a step" else LAST // EVERY * EVERY + EVERY
        return group != LOST or step <= last or step > BACK

    def counts(self, group: int, step: int) -> bool:
        """Whether the changes of a group are in the average after the step."""
        if group == LOST and self.dies != "after the vote" and step == LAST // EVERY * EVERY + EVERY:
            return False
        return self.steps_of(group, step)

    def holders_of(self, name: str) -> list[int]:
        return next((held for unit, held in self.holders.items() if name.startswith(f"{unit}.")), [0, 1, 2])

    def run(self) -> dict[int, tuple[dict[str, torch.Tensor], list[float]]]:
        """Return the anchors and the losses by the steps after which groups average."""
        found, losses = {}, []
        for step in range(1, STEPS + 1):
            if step == BACK + 1:
                self._return()
            losses.append([self._step(group, step) if self.steps_of(group, step) else None for group in range(3)])
            if step % EVERY == 0:
                self._average(step)
                counting = [group for group in range(3) if self.counts(group, step)]
                means = [sum(row[group] for group in counting) / len(counting) for row in losses]
                found[step], losses = ({name: a.detach().clone() for name, a in self.anchors.items()}, means), []
        return found

    def _step(self, group: int, step: int) -> float:
        model, optimizer, case = self.models[group], self.optimizers[group], self.case
        absent = {unit: model.get_submodule(unit) for unit, held in self.holders.items() if group not in held}
        for unit, module in absent.items():
            model.set_submodule(unit, nn.Identity() if case.masking == "forward" else self._copy(unit, module))
        optimizer.zero_grad()
        total = 0.0
        for micro in range(case.accumulation):
            for worker in range(case.fsdp):
                batch = models.micro_batch(case.model, step - 1, micro, group * case.fsdp + worker)
                loss = model(*batch.values() if isinstance(batch, dict) else batch) / (case.accumulation * case.fsdp)
                loss.backward()
                total += loss.item()
        for unit, module in absent.items():
            model.set_submodule(unit, module)
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        for settings in optimizer.param_groups:
            settings["lr"] = self.rates[step - 1]
        optimizer.step()
        return total

    def _copy(self, unit: str, module: nn.Module) -> nn.Module:
        copied = copy.deepcopy(module)
        for name, parameter in copied.named_parameters():
            parameter.data = self.anchors[f"{unit}.{name}"].detach().clone()
        return copied.requires_grad_(False)

    @torch.no_grad()
    def _average(self, step: int) -> None:
        weights = [dict(model.named_parameters()) for model in self.models]
        living = [group for group in range(3) if self.counts(group, step)]
        for name, anchor in self.anchors.items():
            held = [weights[group][name] for group in self.holders_of(name) if group in living]
            anchor.grad = anchor - sum(held) / len(held)
        self.outer.step()
        for name, anchor in self.anchors.items():
            for group in self.holders_of(name):
                weights[group][name].copy_(anchor)

    @torch.no_grad()
    def _return(self) -> None:
        """Give the group that returns the means of the holders' moments. It has the anchors."""
        mine = dict(self.models[LOST].named_parameters())
        self.optimizers[LOST] = self.kind(self.models[LOST].parameters(), **self.params)
        for name, weight in mine.items():
            weight.copy_(self.anchors[name])
            if LOST not in self.holders_of(name):
                continue
            others = [group for group in self.holders_of(name) if group != LOST]
            states = [
                self.optimizers[group].state[dict(self.models[group].named_parameters())[name]] for group in others
            ]
            for key in states[0]:
                values = [state[key] for state in states if state[key] is not None]
                if values:
                    count = key == "step"
                    mean = values[0].clone() if count else torch.stack(values).mean(0)
                    self.optimizers[LOST].state[weight][key] = mean


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


@pytest.mark.parametrize(("case", "dies"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_rounds_with_a_loss_equal_plain_torch(ranks: RankPool, case: Case, dies: str) -> None:
    told = run_groups(ranks, case, elastic, dies)
    answers = [{seen["step"]: Seen(**seen) for seen in of_rank} for of_rank in told]
    start = {name: p.detach() for name, p in models.build(case.model).named_parameters()}
    for step, (anchors, losses) in Loop(case, dies, rates_of(case)).run().items():
        seen = {rank: answer[step] for rank, answer in enumerate(answers) if step in answer}
        slots = sorted({rank // (case.fsdp * case.tp) for rank in seen})
        end = LAST // EVERY * EVERY + EVERY
        assert slots == ([0, 2] if end <= step <= BACK else [0, 1, 2])
        for rank, one in seen.items():
            _compare(one, anchors, start, f"step {step}, rank {rank}")
            assert one.losses == pytest.approx(losses, rel=RELATIVE)
        _compare_holders(seen, case.fsdp * case.tp, step)
        after = dies != "after the vote" and step >= end
        alone = EVERY * 2 * case.accumulation * case.fsdp
        assert {one.skipped_samples for one in seen.values()} == {alone if after else 0}


def rates_of(case: Case) -> list[float]:
    """Return the learning rates of the steps."""
    engine, rates = engine_of(replace(case, groups=2, sync=""), "reference"), []
    for _ in range(STEPS):
        rates.append(engine.get_lr()[0])
        engine.lr_scheduler.step()
    return rates


def _compare(one: Seen, anchors: dict[str, torch.Tensor], start: dict[str, torch.Tensor], where: str) -> None:
    for name, weight in one.full.items():
        moved = (anchors[name] - start[name]).abs().max().item()
        assert moved > 1e-4
        torch.testing.assert_close(
            weight, anchors[name], rtol=0, atol=RELATIVE * anchors[name].abs().max().item(), msg=f"{where}, {name}"
        )


def _compare_holders(seen: dict[int, Seen], per_group: int, step: int) -> None:
    """Anchors and outer state are equal bit for bit at holders, and copies are the anchors."""
    held: dict[tuple[int, str], tuple[torch.Tensor, dict[str, Any]]] = {}
    for rank, one in seen.items():
        for name, anchor in one.anchors.items():
            first, state = held.setdefault((rank % per_group, name), (anchor, one.outer[name]))
            assert torch.equal(first, anchor), f"step {step}: holders of {name} differ"
            assert list(state) == list(one.outer[name])
            for key, value in one.outer[name].items():
                assert torch.equal(state[key], value), f"step {step}: {key} of {name} differs"
    for rank, one in seen.items():
        for name, copied in one.copies.items():
            assert torch.equal(held[rank % per_group, name][0], copied), f"step {step}, rank {rank}: copy of {name}"
