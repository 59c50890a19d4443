"""The DeepSpeed store equals the oracle."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.case_tables import mostly_slow
from sdp.tests.support.cases import (
    Case,
    Result,
    assert_same_run,
    assert_state_as_predicted,
    engine_of,
    evaluations,
    one_step,
    oracle,
    oracle_of,
    rate_of,
    train,
)
from sdp.tests.support.deepspeed_runs import offload_settings, run_under_deepspeed
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
WIDE = [
    Case(2, 1, stage=1, optimizer="momentum", placement="full"),
    Case(4, 1, stage=2, clip=True, placement="profile", model="llama"),
    Case(4, 1, stage=3, accumulation=3, optimizer="adamw", placement="cyclic", model="llama-meta"),
    Case(2, 2, stage=3, clip=True, optimizer="adamw", masking="backward"),
    Case(2, 2, stage=1, accumulation=3, model="llama-tied-meta", masking="backward"),
    Case(2, 2, stage=2, clip=True, optimizer="adamw", model="llama-tied", masking="backward"),
    Case(2, 2, stage=1, neurons=2, model="even-llama"),
    Case(2, 2, stage=2, neurons=3, model="even-llama-tied-meta", optimizer="adamw", clip=True),
    Case(4, 2, stage=3, clip=True, optimizer="adamw", model="mlp-meta"),
    Case(2, 2, stage=2, model="llama-tied-meta", checkpointing="selective"),
]
COVER = [
    Case(2, 2, stage=1, accumulation=1, clip=True, optimizer="adamw"),
    Case(2, 2, stage=2, accumulation=3, model="llama-tied-meta"),
    Case(2, 2, stage=3, accumulation=3, clip=True, optimizer="adamw", model="llama-tied-meta"),
    Case(2, 2, 3, 3, clip=True, optimizer="adamw", neurons=2, masking="backward", model="even-llama"),
    Case(2, 2, stage=2, neurons=2, model="even-llama", masking="backward"),
    Case(2, 2, stage=3, model="llama-meta", masking="backward"),
    Case(2, 2, stage=3, neurons=2, model="even-llama-tied-meta", accumulation=2),
    Case(2, 2, stage=3, model="llama-meta", masking="backward", placement="contiguous"),
]


@pytest.mark.parametrize(
    "case", [*mostly_slow(COVER), *(pytest.param(case, marks=pytest.mark.full_table) for case in WIDE)], ids=str
)
def test_deepspeed_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    """Bytes of parameters, gradients and optimizer state are as predicted too."""
    ours = run_under_deepspeed(ranks, case)
    assert_same_run(ours, oracle(case), case)
    assert_state_as_predicted(ours)
    assert all((result.predicted["optimizer"] > 0) == (case.optimizer != "sgd") for result in ours)


def _offloaded(case: Case) -> Result:
    return train(case, "deepspeed", **offload_settings(case.stage))


OFFLOADED = Case(2, 2, stage=2, accumulation=3, clip=True, optimizer="adamw")


@pytest.mark.parametrize("case", [OFFLOADED, replace(OFFLOADED, stage=3, masking="backward")], ids=str)
def test_offloaded_optimizers_equal_the_oracle(ranks: RankPool, case: Case) -> None:
    assert_same_run(ranks.run(_offloaded, case, world=case.world), oracle(case), case)


def _evaluations(case: Case) -> tuple[float, list[float], float]:
    """Losses of the full model and of subnetworks after a step, and the next step's norm."""
    engine, rank = engine_of(case, "deepspeed"), dist.get_rank()
    one_step(engine, case, 0, data_rank=rank)
    engine.step()
    batches = [models.micro_batch(case.model, 7, micro, rank) for micro in range(2)]
    results = engine.evaluate(batches), engine.evaluate_subnetworks(batches)
    one_step(engine, case, 1, data_rank=rank)
    engine.step()
    return *results, engine.get_global_grad_norm()


def test_the_full_model_is_evaluated(ranks: RankPool) -> None:
    case = Case(2, 2, stage=3, model="llama-tied-meta")
    oracle, ranks_of_data = oracle_of(case), range(case.data_ranks)
    steps = [[models.micro_batch(case.model, step, 0, rank) for rank in ranks_of_data] for step in range(2)]
    oracle.step([steps[0]], rate_of(case, 0))
    rows = [[models.micro_batch(case.model, 7, micro, rank) for micro in range(2)] for rank in ranks_of_data]
    loss, own = evaluations(oracle, rows)
    expected = oracle.step([steps[1]], rate_of(case, 1)).norm
    for full, subnetworks, norm in ranks.run(_evaluations, case, world=case.world):
        assert full == pytest.approx(loss, rel=1e-5)
        assert subnetworks == pytest.approx(own, rel=1e-5)
        assert norm == pytest.approx(expected, rel=1e-5)


def test_bf16_is_near_the_oracle(ranks: RankPool) -> None:
    case = Case(2, 2, stage=1, optimizer="adamw", bf16=True, model="llama-tied-meta")
    theirs = oracle(case)
    assert theirs.after is not None and theirs.before is not None
    ours = run_under_deepspeed(ranks, case)
    assert ours[0].after is not None
    for name, after in theirs.after.items():
        assert ours[0].after[name].dtype == torch.float32
        torch.testing.assert_close(ours[0].after[name], after, rtol=0, atol=0.02 * after.abs().max().item())
        assert not torch.equal(ours[0].after[name], ours[0].after[name].bfloat16().float()), (
            f"{name}: no float32 master"
        )
    assert torch.tensor([r.losses for r in ours]).mean(0).tolist() == pytest.approx(theirs.losses, rel=0.02)
    assert ours[0].norms == pytest.approx(theirs.norms, rel=0.1)
