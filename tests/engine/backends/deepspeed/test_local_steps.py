"""Local steps under DeepSpeed equal those of the oracle."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import DataError
from sdp.tests.support import models
from sdp.tests.support.cases import (
    Case,
    assert_same_run,
    engine_of,
    evaluations,
    one_step,
    oracle,
    oracle_of,
    rate_of,
    train,
)
from sdp.tests.support.deepspeed_runs import run_under_deepspeed
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def full_table(*values: Any) -> Any:
    """Mark a row that only the full table has."""
    return pytest.param(*values, marks=pytest.mark.full_table)


COVER = [
    Case(2, 2, 0, 2, clip=True, steps=4, sync='{"every": 3}', model="llama-tied"),
    Case(2, 2, 1, optimizer="adamw", clip=True, steps=3, sync='{"every": 1}', masking="backward"),
    Case(2, 2, 2, 2, steps=6, sync='{"every": 3}', masking="backward", model="llama-tied-meta"),
    Case(2, 2, 3, clip=True, optimizer="adamw", steps=4, sync='{"every": 2, "fragments": 2}', model="llama-tied-meta"),
    Case(2, 2, stage=3, steps=4, sync='{"every": 3, "fragments": 3}', masking="backward", model="llama-meta"),
]  # fmt: skip
WIDE = [
    Case(2, 2, 0, optimizer="adamw", steps=5, sync='{"every": 2, "fragments": 2}', masking="backward"),
    Case(2, 1, 3, 2, steps=5, sync='{"every": 4, "fragments": 2, "overlap": '
                                   '1}', masking="backward", model="llama-meta"),
    Case(2, 2, 1, optimizer="momentum", steps=5, masking="backward",
         sync='{"every": 2, "fragments": 1, "overlap": 1, "single_holder": "skip"}'),
    Case(2, 2, 2, optimizer="adamw", steps=5, sync='{"every": 2, "start_after": 2, "offload": "cpu"}'),
    Case(2, 2, 1, steps=4, clip=True,
         sync='{"every": 2, "outer_optimizer": {"type": "AdamW", "params": {"lr": 0.05, "eps": 0.01}}}'),
    Case(2, 2, 2, neurons=2, steps=4, sync='{"every": 2}', model="even-llama", masking="backward"),
    Case(2, 2, 2, neurons=2, steps=4, sync='{"every": 2, "fragments": 2}', model="even-llama-tied-meta", clip=True),
    Case(2, 2, 3, neurons=2, steps=4, sync='{"every": 3, "single_holder": '
                                           '"skip"}', model="even-llama", masking="backward"),
    Case(2, 2, 0, steps=4, sync='{"every": 2}', model="resnet-meta"),
    Case(2, 2, 2, steps=4, sync='{"every": 2}', model="resnet-meta"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*COVER, *map(full_table, WIDE)], ids=str)
def test_deepspeed_equals_the_reference(ranks: RankPool, case: Case) -> None:
    """Bytes are as planned too: those of the state, and in every step those that are sent."""
    ours = run_under_deepspeed(ranks, case)
    assert_same_run(ours, oracle(case), case)
    for rank, result in enumerate(ours):
        assert result.traffic == result.planned_steps, f"rank {rank}"
        assert result.measured == result.predicted, f"rank {rank}"


PLAIN = '{"type": "SGD", "params": {"lr": 1.0}}'


@pytest.mark.parametrize("stage", [full_table(0), 1, full_table(3)])
def test_one_group_with_plain_averages_trains_as_usual(ranks: RankPool, stage: int) -> None:
    usual = Case(1, 2, stage, 2, steps=4, optimizer="adamw", clip=True, model="llama-tied-meta")
    local = replace(usual, sync=f'{{"every": 2, "outer_optimizer": {PLAIN}}}')
    ours, theirs = run_under_deepspeed(ranks, local), run_under_deepspeed(ranks, usual)
    assert ours[0].after is not None and theirs[0].after is not None
    for name, weight in theirs[0].after.items():
        torch.testing.assert_close(ours[0].after[name], weight, rtol=0, atol=1e-6, msg=name)
    for result, usual_result in zip(ours, theirs, strict=True):
        assert result.losses == pytest.approx(usual_result.losses, rel=1e-5)
        assert result.norms == pytest.approx(usual_result.norms, rel=1e-5)
        assert result.rates == usual_result.rates


def _nan_in_one_group(case: Case) -> tuple[list[int], list[float], list[bool], dict[str, torch.Tensor] | None]:
    """Return skipped steps and rates after each of 4 steps, whether weights moved, and the full
    model at the end.
    """
    engine = engine_of(case, "deepspeed")
    skipped, rates, moved = [], [], []
    for step in range(4):
        batch = dict(models.micro_batch(case.model, step, 0, dist.get_rank()))
        if step == 1 and dist.get_rank() == case.world - 1:
            batch["x"] = batch["x"] * float("nan")
        if case.bf16:
            batch["x"] = batch["x"].bfloat16()
        before = {name: part.clone() for name, part in _own_weights(engine).items()}
        engine.backward(engine(batch))
        engine.step()
        skipped.append(engine.skipped_steps)
        rates.append(engine.get_lr()[0])
        moved.append(any(not torch.equal(before[name], part) for name, part in _own_weights(engine).items()))
    engine.check_holders()
    return skipped, rates, moved, engine.full_state_dict()


def _own_weights(engine: Any) -> dict[str, torch.Tensor]:
    return {key: engine.backend.local_weight(key) for key in engine.backend.local.boxes}


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), full_table(0, True), full_table(2, False), (3, True)])
def test_only_the_group_with_a_nan_skips_its_update(ranks: RankPool, stage: int, bf16: bool) -> None:
    """The schedule goes on in all groups."""
    case = Case(2, 2, stage, optimizer="adamw", clip=True, sync='{"every": 4}', bf16=bf16)
    answers = ranks.run(_nan_in_one_group, case, world=case.world)
    for rank, (skipped, rates, moved, _) in enumerate(answers):
        assert skipped == [0, 1, 1, 1]
        assert moved == [True, rank < 2, True, True]
        assert rates == answers[0][1]
    assert len(set(answers[0][1])) > 1
    model = answers[0][3]
    assert model is not None and all(bool(torch.isfinite(weight).all()) for weight in model.values())


def _evaluated_in_a_round(case: Case) -> tuple[float, list[float], list[float]]:
    """Return losses of the full model and of the subnetworks after step 3, and the training losses
    of all steps.
    """
    engine, rank = engine_of(case, "deepspeed"), dist.get_rank()
    losses, full, subnetworks = [], 0.0, []
    for step in range(5):
        losses.append(one_step(engine, case, step, data_rank=rank))
        engine.step()
        if step == 2:
            batches = [models.micro_batch(case.model, 7, micro, rank) for micro in range(2)]
            full, subnetworks = engine.evaluate(batches), engine.evaluate_subnetworks(batches)
    return full, subnetworks, losses


@pytest.mark.parametrize("case", [
    Case(2, 2, 3, model="llama-meta", masking="backward", sync='{"every": 2}'),
    full_table(Case(2, 2, 3, model="llama-tied-meta", sync='{"every": 4, "fragments": 2}')),
    full_table(Case(2, 2, 1, model="llama-tied-meta", sync='{"every": 2}')),
    full_table(Case(2, 2, 0, model="llama-tied-meta", sync='{"every": 2}')),
], ids=str)  # fmt: skip
def test_evaluation_in_a_round_uses_the_anchors_and_training_goes_on(ranks: RankPool, case: Case) -> None:
    oracle, losses, ranks_of_data = oracle_of(case), [], range(case.data_ranks)
    for step in range(5):
        batches = [models.micro_batch(case.model, step, 0, rank) for rank in ranks_of_data]
        losses.append(oracle.step([batches], rate_of(case, step)).loss)
        if step == 2:
            rows = [[models.micro_batch(case.model, 7, micro, rank) for micro in range(2)] for rank in ranks_of_data]
            full, subnetworks = evaluations(oracle, rows)
    answers = ranks.run(_evaluated_in_a_round, case, world=case.world)
    for ours in answers:
        assert ours[0] == pytest.approx(full, rel=1e-5)
        assert ours[1] == pytest.approx(subnetworks, rel=1e-5)
    means = torch.tensor([ours[2] for ours in answers], dtype=torch.float64).mean(0).tolist()
    assert means == pytest.approx(losses, rel=1e-5)


def _facts(case: Case, name: str) -> list[tuple[float, float]]:
    """Return drift and norm of the outer gradient of every outer step."""
    engine = engine_of(case, name)
    facts = []
    for step in range(4):
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
        last = engine.local_training.last
        facts += [(last.drift, last.gradient_norm)] if last is not None else []
    return facts


@pytest.mark.full_table
@pytest.mark.parametrize("stage", [0, 2])
def test_facts_of_outer_steps_equal_those_of_fsdp2(ranks: RankPool, stage: int) -> None:
    case = Case(2, 2, stage=stage, sync='{"every": 2, "fragments": 2}')
    expected = ranks.run(_facts, replace(case, stage=0), "fsdp2", world=4)
    for facts in ranks.run(_facts, case, "deepspeed", world=4):
        torch.testing.assert_close(torch.tensor(facts), torch.tensor(expected[0]), rtol=1e-5, atol=0)


def _goes_on_after_an_error(case: Case, disturbed: bool) -> list[float]:
    engine, losses = engine_of(case, "deepspeed"), []
    for step in range(4):
        losses.append(one_step(engine, case, step, data_rank=dist.get_rank()))
        engine.step()
        if disturbed and step == 0:
            with pytest.raises(DataError):
                engine.evaluate([{"unknown": torch.zeros(2)}])
    return losses


def test_an_error_in_an_evaluation_leaves_the_groups_their_weights(ranks: RankPool) -> None:
    case = Case(2, 2, 1, sync='{"every": 3}')
    runs = [ranks.run(_goes_on_after_an_error, case, disturbed, world=4) for disturbed in (True, False)]
    assert runs[0] == runs[1]


def _sent_and_planned(case: Case) -> tuple[list[dict[str, int]], list[dict[str, int]], float]:
    result = train(case, "deepspeed")
    return result.traffic, result.planned_steps, result.losses[-1]


@pytest.mark.full_table
@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_compressed_changes_have_the_planned_bytes(ranks: RankPool, stage: int, compression: str) -> None:
    sync = f'{{"every": 2, "compression": "{compression}"}}'
    case = Case(2, 2, stage=stage, steps=4, sync=sync, optimizer="adamw", model="llama-tied")
    answers = ranks.run(_sent_and_planned, case, world=4)
    for sent, planned, _ in answers:
        assert sent == planned
    exact = oracle(replace(case, stage=0, sync='{"every": 2}')).losses[-1]
    assert sum(loss for *_, loss in answers) / 4 == pytest.approx(exact, rel=1e-2)
