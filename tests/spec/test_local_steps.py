"""Local steps: every store equals the oracle, and the oracle equals a loop in plain torch."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from sdp.tests.support import models
from sdp.tests.support.cases import (
    Case,
    assert_same_run,
    data_rank_of,
    engine_of,
    evaluations,
    native,
    one_step,
    oracle,
    oracle_of,
    rate_of,
)
from sdp.tests.support.ranks import RankPool
from torch import nn

PLAIN = '{"type": "SGD", "params": {"lr": 1.0}}'
COVER = [
    Case(2, 1, 0, 2, steps=6, sync='{"every": 3}'),
    pytest.param(Case(2, 2, 3, optimizer="adamw", steps=4, sync='{"every": 2}', masking="backward", model="llama-meta"),
                 marks=pytest.mark.slow),
    Case(4, 1, optimizer="adamw", steps=5, sync='{"every": 1, "single_holder": "skip"}', placement="random", clip=True),
    Case(2, 1, steps=4, sync='{"every": 2, "fragments": 2}', placement="contiguous", masking="backward", model="llama"),
    Case(2, 2, 0, 2, steps=6, sync='{"every": 4, "fragments": 2, "overlap": 1}', masking="backward",
         optimizer="adamw"),
    Case(2, 1, steps=5, sync='{"every": 2, "start_after": 2}', optimizer="adamw", model="llama-tied"),
    Case(2, 2, 2, neurons=2, steps=4, sync='{"every": 2, "fragments": 2}', model="even-llama-tied-meta", clip=True),
    Case(2, 1, 3, neurons=2, steps=4, sync='{"every": 3, "single_holder": "skip"}', model="wide-llama-tied-meta", tp=2,
         optimizer="adamw", masking="backward"),
    Case(2, 1, tp=2, steps=4, sync='{"every": 2, "offload": "cpu"}', model="even-llama", clip=True, masking="backward"),
    Case(4, 1, steps=7, sync='{"every": 6, "fragments": 3, "overlap": 1, "outer_optimizer": {"type": "SGD", '
                             '"params": {"lr": 0.5, "momentum": 0.5}}}',
         placement="cyclic", optimizer="momentum"),
    Case(2, 2, 2, 2, checkpointing="full", steps=4, sync='{"every": 2}', placement="balanced", optimizer="momentum"),
]  # fmt: skip
BATCH_NORM = Case(
    2, 1, steps=5, sync='{"every": 4, "fragments": 2, "overlap": 1}', model="resnet-meta", masking="backward"
)
COMPRESSED = [
    Case(4, 1, steps=4, sync='{"every": 2, "compression": "int8"}', optimizer="adamw"),
    Case(2, 2, 3, steps=4, sync='{"every": 2, "compression": "bf16"}', model="llama-meta"),
    Case(2, 1, neurons=2, steps=4, sync='{"every": 2, "compression": "int8"}', model="even-llama"),
]


@pytest.mark.parametrize("case", [*COVER, BATCH_NORM], ids=str)
def test_fsdp2_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    assert_same_run(native(ranks, case), oracle(case), case)


@pytest.mark.parametrize("case", [*COVER, *COMPRESSED], ids=str)
def test_between_averages_only_the_loss_and_the_norm_leave_a_group(ranks: RankPool, case: Case) -> None:
    for rank, result in enumerate(native(ranks, case)):
        assert result.measured == result.predicted, f"rank {rank}"
        between = [sum(sent for kind, sent in of.items() if kind.startswith("between")) for of in result.traffic]
        every, fragments = json.loads(case.sync)["every"], json.loads(case.sync).get("fragments", 1)
        assert max(between) > 0
        assert min(between) == 0 or every == fragments
        for step, sent in enumerate(result.traffic):
            control = sum(nbytes for kind, nbytes in sent.items() if kind.startswith("control"))
            assert control < 1024, f"step {step}"


class Loop:
    """Local steps of the MLP in plain torch: a model, an optimizer and rows for each group, one
    after the other. torch's own optimizer steps on the anchors.
    """

    def __init__(self, case: Case, rates: list[float]):
        self.case, self.sync = case, DEFAULTS | json.loads(case.sync)
        config = case.config()
        self.holders: dict[str, list[int]] = config["sdp"]["placement"]
        self.anchors = {n: nn.Parameter(p.detach().clone()) for n, p in models.build(case.model).named_parameters()}
        self.groups = [models.build(case.model) for _ in range(case.groups)]
        settings = dict(config["optimizer"]["params"])
        kind = getattr(torch.optim, config["optimizer"]["type"])
        self.optimizers = [kind(group.parameters(), **settings) for group in self.groups]
        self.rates = rates
        outer = self.sync["outer_optimizer"]
        self.outer = getattr(torch.optim, outer["type"])(self.anchors.values(), **outer["params"])
        self.under_way: dict[int, list[Change]] = {}  # by the step after which they are applied
        self.clip = config["gradient_clipping"]

    def holders_of(self, name: str) -> list[int]:
        return next(
            (h for unit, h in self.holders.items() if name.startswith(f"{unit}.")), list(range(self.case.groups))
        )

    def fragment_of(self, name: str) -> int:
        units = list(self.holders)
        index = next((i for i, unit in enumerate(units) if name.startswith(f"{unit}.")), None)
        return 0 if index is None else index % self.sync["fragments"]

    def run(self) -> dict[str, torch.Tensor]:
        every, fragments, start_after = (self.sync[key] for key in ("every", "fragments", "start_after"))
        for step in range(1, self.case.steps + 1):
            for group in range(self.case.groups):
                self._backward(group, step)
            if step <= start_after:
                self._average_gradients()
            for group in range(self.case.groups):
                self._inner_step(group, step)
            if step <= start_after:
                for name, anchor in self.anchors.items():
                    anchor.data.copy_(self._weights(name)[0])
                continue
            since = step - start_after
            for change in self.under_way.pop(since, []):
                self._apply(change)
            for fragment in range(fragments):
                if (since + fragment * every // fragments) % every == 0:
                    self.under_way[since + self.sync["overlap"]] = [self._change(n) for n in self._names_in(fragment)]
            for change in self.under_way.pop(since, []):
                self._apply(change)
        return {name: anchor.detach() for name, anchor in self.anchors.items()}

    def _names_in(self, fragment: int) -> list[str]:
        return [name for name in self.anchors if self.fragment_of(name) == fragment]

    def _weights(self, name: str) -> list[torch.Tensor]:
        return [dict(self.groups[group].named_parameters())[name].detach() for group in self.holders_of(name)]

    def _backward(self, group: int, step: int) -> None:
        model, optimizer, case = self.groups[group], self.optimizers[group], self.case
        absent = {unit: model.get_submodule(unit) for unit, holders in self.holders.items() if group not in holders}
        for unit in absent:
            model.set_submodule(unit, self._stand_in(unit))
        optimizer.zero_grad()
        for micro in range(case.accumulation):
            for worker in range(case.fsdp):
                batch = models.micro_batch(case.model, step - 1, micro, group * case.fsdp + worker)
                (
                    model(*batch.values() if isinstance(batch, dict) else batch) / (case.accumulation * case.fsdp)
                ).backward()
        for unit, module in absent.items():
            model.set_submodule(unit, module)

    def _average_gradients(self) -> None:
        """Give all holders the mean of their gradients, as in every step before local steps."""
        for name in self.anchors:
            weights = [dict(self.groups[group].named_parameters())[name] for group in self.holders_of(name)]
            mean = torch.stack([weight.grad for weight in weights if weight.grad is not None]).mean(0)
            for weight in weights:
                weight.grad = mean.clone()

    def _inner_step(self, group: int, step: int) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.groups[group].parameters(), self.clip)
        for settings in self.optimizers[group].param_groups:
            settings["lr"] = self.rates[step - 1]
        self.optimizers[group].step()

    def _stand_in(self, unit: str) -> nn.Module:
        """The identity, or with backward masking a copy of the anchors that is not trained."""
        if self.case.masking == "forward":
            return nn.Identity()
        block = copy.deepcopy(self.groups[0].get_submodule(unit))
        for name, parameter in block.named_parameters():
            parameter.data = self.anchors[f"{unit}.{name}"].clone()
        return block.requires_grad_(False)

    def _change(self, name: str) -> Change:
        weights = self._weights(name)
        before = [weight.clone() for weight in weights]
        return Change(name, self.anchors[name].detach() - sum(before) / len(before), before)

    @torch.no_grad()
    def _apply(self, change: Change) -> None:
        anchor, weights = self.anchors[change.name], self._weights(change.name)
        anchor.grad = change.mean
        self.outer.step()
        anchor.grad = None
        if len(weights) == 1 and self.sync["single_holder"] == "skip":
            anchor.copy_(weights[0])
            return
        for weight, before in zip(weights, change.before, strict=True):
            weight.copy_(anchor + (weight - before))


class Change(NamedTuple):
    """The mean change of a parameter, and the holders' weights when it was sent."""

    name: str
    mean: torch.Tensor
    before: list[torch.Tensor]


DEFAULTS = {
    "fragments": 1,
    "overlap": 0,
    "start_after": 0,
    "single_holder": "outer",
    "outer_optimizer": {"type": "SGD", "params": {"lr": 0.7, "momentum": 0.9, "nesterov": True}},
}


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 0, 2, steps=6, sync='{"every": 3}'),
        Case(2, 2, accumulation=2, steps=6, sync='{"every": 4, "fragments": 2}', optimizer="adamw", clip=True),
        Case(4, 1, steps=5, sync='{"every": 2, "single_holder": "skip"}', optimizer="momentum", masking="backward"),
        Case(4, 1, steps=4, sync=f'{{"every": 1, "outer_optimizer": {PLAIN}}}', optimizer="adamw", masking="backward"),
        Case(4, 1, steps=9, optimizer="momentum", masking="backward",
             sync='{"every": 4, "fragments": 2, "overlap": 1}'),
        Case(4, 1, steps=11, sync='{"every": 6, "fragments": 2, "overlap": 2, "single_holder": "skip"}', clip=True,
             optimizer="adamw"),
        Case(2, 2, 0, 2, steps=8, sync='{"every": 3, "start_after": 3, "overlap": 1}', optimizer="momentum"),
        Case(2, 1, steps=6, optimizer="adamw", sync='{"every": 2, "outer_optimizer": {"type": "SGD", "params": '
                                                    '{"lr": 0.5, "momentum": 0.5}}}'),
    ],
    ids=str,
)  # fmt: skip
def test_the_oracle_equals_a_loop(case: Case) -> None:
    ours = oracle(case)
    expected = Loop(case, ours.rates).run()
    assert ours.after is not None and ours.before is not None
    for name, weight in expected.items():
        moved = (weight - ours.before[name]).abs().max()
        assert moved > 1e-3
        torch.testing.assert_close(ours.after[name], weight, rtol=0, atol=float(1e-5 * moved + 1e-6), msg=name)


def test_one_group_with_plain_averages_trains_as_usual(ranks: RankPool) -> None:
    usual = Case(1, 2, 1, 2, steps=5, optimizer="adamw", clip=True, model="mlp-meta")
    local = replace(usual, sync=f'{{"every": 2, "outer_optimizer": {PLAIN}}}')
    # The full model is that of the last average, after step 4.
    expected = replace(oracle(usual), after=oracle(replace(usual, steps=4)).after)
    for ours in ([oracle(local)], native(ranks, local)):
        assert_same_run(ours, expected, local)


def _with_evaluations(case: Case, evaluates: bool) -> tuple[dict[str, torch.Tensor] | None, list[float], list[float]]:
    """Weights, held-out losses after every step if asked, and losses."""
    engine, held_out, losses = engine_of(case), [], []
    batches = [models.micro_batch(case.model, 99, micro, data_rank_of(case)) for micro in range(2)]
    for step in range(case.steps):
        losses.append(one_step(engine, case, step, data_rank=data_rank_of(case)))
        engine.step()
        if evaluates:
            held_out.append(engine.evaluate(batches))
    return engine.full_state_dict(), held_out, losses


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(2, 2, 3, steps=5, model="llama-tied-meta", optimizer="adamw", sync='{"every": 3}'),
            marks=pytest.mark.slow,
        ),
        Case(2, 1, steps=5, model="resnet-meta", sync='{"every": 4, "fragments": 2, "overlap": 1}', masking="backward"),
    ],
    ids=str,
)
def test_an_evaluation_in_a_round_is_that_of_the_anchors_and_changes_nothing(ranks: RankPool, case: Case) -> None:
    plain, watched = (ranks.run(_with_evaluations, case, evaluates, world=case.world) for evaluates in (False, True))
    assert plain[0][0] is not None and watched[0][0] is not None
    for name, weight in plain[0][0].items():
        assert torch.equal(watched[0][0][name], weight), name
    assert [answer[2] for answer in watched] == [answer[2] for answer in plain]
    held_out = watched[0][1]
    every = json.loads(case.sync)["every"]
    if every == 3:  # steps 1 and 2 have the anchors of the start, steps 3 to 5 those of the average
        assert held_out[0] == held_out[1] != held_out[2] == held_out[3] == held_out[4]
    else:  # applied after steps 3 and 5
        assert held_out[0] == held_out[1] != held_out[2] == held_out[3] != held_out[4]


def _ended(case: Case) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
    engine = engine_of(case)
    for step in range(case.steps):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
    before = engine.full_state_dict()
    assert engine.finish_round()
    assert not engine.finish_round()
    return before, engine.full_state_dict()


def test_the_end_of_a_run_averages_what_is_left(ranks: RankPool) -> None:
    """Plain averages of one group give its weights. A second call changes nothing."""
    case = Case(1, 2, 1, steps=5, optimizer="adamw", sync=f'{{"every": 3, "outer_optimizer": {PLAIN}}}')
    before, after = ranks.run(_ended, case, world=2)[0]
    usual = oracle(replace(case, sync=""))
    assert before is not None and after is not None and usual.after is not None
    for name, weight in usual.after.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6, msg=name)
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_a_group_with_a_nan_gradient_skips_alone(ranks: RankPool) -> None:
    case = Case(2, 1, steps=2, sync='{"every": 2}')
    for rank, (skipped, changed, step, norm) in enumerate(ranks.run(_with_a_nan, case, world=2)):
        assert skipped == 1 and step == 1
        assert changed == (rank == 0)
        assert norm > 0, "the mean over the groups that took the step"


def _with_a_nan(case: Case) -> tuple[int, bool, int, float]:
    """A NaN in the second group: skips, whether weights changed, steps, norm."""
    engine, rank = engine_of(case), data_rank_of(case)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters_here.items()}
    loss = engine(models.micro_batch(case.model, 0, 0, rank))
    engine.backward(loss * (float("nan") if rank == 1 else 1.0))
    engine.step()
    changed = any(not torch.equal(before[name], of) for name, of in engine.parameters_here.items())
    return engine.skipped_steps, changed, engine.global_steps, engine.get_global_grad_norm()


def _statistics(case: Case, evaluates: bool) -> dict[str, torch.Tensor]:
    """This rank's statistics after a step, and after an evaluation if asked."""
    engine, rank = engine_of(case), data_rank_of(case)
    one_step(engine, case, 0, data_rank=rank)
    engine.step()
    if evaluates:
        engine.evaluate_subnetworks([models.micro_batch(case.model, 99, 0, rank)])
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers() if "running" in name}


def test_an_evaluation_of_subnetworks_leaves_each_group_its_statistics(ranks: RankPool) -> None:
    case = Case(2, 1, model="resnet-meta", sync='{"every": 3}')
    plain, watched = (ranks.run(_statistics, case, evaluates, world=2) for evaluates in (False, True))
    assert not torch.equal(plain[0]["bn1.running_mean"], plain[1]["bn1.running_mean"]), "groups have seen other images"
    for before, after in zip(plain, watched, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def _subnetwork_losses(case: Case) -> list[float]:
    engine, rank = engine_of(case), data_rank_of(case)
    one_step(engine, case, 0, data_rank=rank)
    engine.step()
    return engine.evaluate_subnetworks([models.micro_batch(case.model, 99, 0, rank)])


def test_subnetworks_in_a_round_have_the_losses_of_the_oracle(ranks: RankPool) -> None:
    """Each with its group's own weights and statistics."""
    case = Case(2, 2, 1, model="resnet-meta", sync='{"every": 3}')
    groups = oracle_of(case)
    groups.step([[models.micro_batch(case.model, 0, 0, rank) for rank in range(4)]], rate_of(case, 0))
    _, expected = evaluations(groups, [[models.micro_batch(case.model, 99, 0, rank)] for rank in range(4)])
    for losses in ranks.run(_subnetwork_losses, case, world=case.world):
        assert losses == pytest.approx(expected, rel=1e-5)
