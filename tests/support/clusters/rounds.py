"""Local steps with elastic groups: what a rank has after an outer step, and the same in plain
torch.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from sdp.engine.elastic.session import Session
from torch import nn

from .. import models
from ..cases import RELATIVE, Case, engine_of
from .living import holders_among, part_of, whole_weights

EVERY, STEPS = 3, 15  # of a round, of the run
LOST = 1  # the group that is lost
BACK = 9  # it returns after this step


@dataclass
class Seen:
    """What a rank has after an outer step."""

    step: int
    living: list[int]
    anchors: dict[str, torch.Tensor]  # this rank's parts
    full: dict[str, torch.Tensor]  # whole anchors
    parts: dict[str, torch.Tensor]  # the model's parameters on this rank, while they are the anchors
    outer: dict[str, dict[str, torch.Tensor]]  # the outer optimizer's state
    copies: dict[str, torch.Tensor]
    losses: list[float]  # of the steps since the last one, over all groups
    skipped_samples: int


def look(engine: Any, session: Session, losses: list[float]) -> Seen:
    assert session.assembly is not None
    local = engine.backend.local
    outer = local.outer
    with local.anchored():
        full = whole_weights(engine)
        parts = {name: part_of(p) for name, p in engine.parameters_here.items()}
    return Seen(
        engine.global_steps,
        session.assembly.slots,
        {name: anchor.detach().clone() for name, anchor in outer.anchors.items()},
        full,
        parts,
        {name: _state(outer.optimizer.state.get(anchor, {})) for name, anchor in outer.anchors.items()},
        {name: part_of(p) for name, p in engine.frozen_here.items()},
        losses,
        engine.local_training.skipped_samples,
    )


def _state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items() if value is not None}


class Loop:
    """Local steps of the MLP with a model, an optimizer and rows for each of three groups."""

    def __init__(self, case: Case, rates: list[float]):
        self.case, self.sync = case, json.loads(case.sync)
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
        raise NotImplementedError

    def counts(self, group: int, step: int) -> bool:
        """Whether the changes of a group are in the average after the step."""
        raise NotImplementedError

    def holders_of(self, name: str) -> list[int]:
        return next((held for unit, held in self.holders.items() if name.startswith(f"{unit}.")), [0, 1, 2])

    def run(self) -> dict[int, tuple[dict[str, torch.Tensor], list[float]]]:
        """Return the anchors and the losses by the steps after which groups average."""
        found, losses = {}, []
        for step in range(1, STEPS + 1):
            if step == BACK + 1:
                self.give_back()
            losses.append([self._step(group, step) if self.steps_of(group, step) else None for group in range(3)])
            if step % EVERY == 0:
                self.average(step)
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
    def average(self, step: int) -> None:
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
    def give_back(self) -> None:
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
            for key in states[0] if states else ():
                values = [state[key] for state in states if state[key] is not None]
                if values:
                    count = key == "step"
                    mean = values[0].clone() if count else torch.stack(values).mean(0)
                    self.optimizers[LOST].state[weight][key] = mean


def rates_of(case: Case) -> list[float]:
    """Return the learning rates of the steps."""
    engine, rates = engine_of(replace(case, groups=2, sync="", placement="mixed"), "reference"), []
    for _ in range(STEPS):
        rates.append(engine.get_lr()[0])
        engine.lr_scheduler.step()
    return rates


def compare(one: Seen, anchors: dict[str, torch.Tensor], start: dict[str, torch.Tensor], where: str) -> None:
    for name, weight in one.full.items():
        moved = (anchors[name] - start[name]).abs().max().item()
        assert moved > 1e-4
        torch.testing.assert_close(
            weight, anchors[name], rtol=0, atol=RELATIVE * anchors[name].abs().max().item(), msg=f"{where}, {name}"
        )


def compare_holders(seen: dict[int, Seen], per_group: int, step: int) -> None:
    """Anchors and outer state are equal bit for bit at holders, and copies are the anchors."""
    held: dict[tuple[int, str], tuple[torch.Tensor, dict[str, Any]]] = {}
    for rank, one in seen.items():
        for name, anchor in one.anchors.items():
            first, state = held.setdefault((rank % per_group, name), (anchor, one.outer[name]))
            assert torch.equal(first, anchor), f"step {step}: holders of {name} differ"
            assert list(state) == list(one.outer[name])
            for key, value in one.outer[name].items():
                assert torch.equal(state[key], value), f"step {step}: {key} of {name} differs"
    parts = {(rank % per_group, name): part for rank, one in seen.items() for name, part in one.parts.items()}
    for rank, one in seen.items():
        for name, copied in one.copies.items():
            assert torch.equal(parts[rank % per_group, name], copied), f"step {step}, rank {rank}: copy of {name}"
