"""The DeepSpeed backend equals the reference; with one group it is DeepSpeed as it comes."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import ranks_models as models
import torch
import torch.distributed as dist
from ranks import RankPool
from ranks_cases import Case, Result, assert_same_run, engine_of, reference, train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _train(case: Case) -> Result:
    return train(case, "deepspeed")


def deepspeed(ranks: RankPool, case: Case) -> list[Result]:
    """The run by rank."""
    return ranks.run(_train, case, world=case.world)


WIDE = [
    Case(2, 1, stage=1, optimizer="momentum", placement="full"),
    Case(4, 1, stage=2, clip=True, placement="profile", model="llama"),
    Case(4, 1, stage=3, accumulation=3, optimizer="adamw", placement="cyclic", model="llama-meta"),
    Case(2, 2, stage=0, clip=True, optimizer="adamw", masking="backward"),
    Case(2, 2, stage=1, accumulation=3, model="llama-tied-meta", masking="backward"),
    Case(2, 2, stage=2, clip=True, optimizer="adamw", model="llama-tied", masking="backward"),
    Case(2, 2, stage=3, model="llama-meta", masking="backward"),
    Case(2, 2, stage=0, neurons=2, model="even-llama"),
    Case(2, 2, stage=2, neurons=3, model="even-llama-tied-meta", optimizer="adamw", clip=True),
    Case(2, 2, stage=3, neurons=2, model="even-llama-tied-meta", accumulation=3),
    Case(4, 2, stage=3, clip=True, optimizer="adamw", model="mlp-meta"),
    Case(2, 2, stage=3, model="llama-tied-meta", checkpointing="full"),
    Case(2, 2, stage=2, model="llama-tied-meta", checkpointing="selective"),
]
COVER = [
    Case(2, 2, stage=0, accumulation=3, clip=True, model="llama-tied"),
    Case(2, 2, stage=1, accumulation=1, clip=True, optimizer="adamw"),
    Case(2, 2, stage=2, accumulation=3, model="llama-tied-meta"),
    Case(2, 2, stage=3, accumulation=3, clip=True, optimizer="adamw", model="llama-tied-meta"),
]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_deepspeed_equals_the_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(deepspeed(ranks, case), reference(case), case)


@pytest.mark.full_table
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_deepspeed_equals_the_reference_everywhere(ranks: RankPool, case: Case) -> None:
    plain = replace(case, checkpointing="none")
    assert_same_run(deepspeed(ranks, case), reference(plain), case)


# -- unlike others ---------------------------------------------------------------------------------------------------------------------


def _nan_in_one_group(stage: int, offload: bool) -> tuple[list[int], bool, bool]:
    """Skipped steps after each of 4, of which rank 3 (the last group) has a NaN in the second; whether holders agree and steps go on."""
    case = Case(2, 2, stage=stage, optimizer="adamw", clip=True)
    engine = engine_of(case, "deepspeed", **offloaded(stage, offload))
    skipped, states = [], [engine.full_state_dict()]
    for step in range(4):
        batch = dict(models.micro_batch(case.model, step, 0, dist.get_rank()))
        if step == 1 and dist.get_rank() == 3:
            batch["x"] = batch["x"] * float("nan")
        engine.backward(engine(batch))
        engine.step()
        skipped.append(engine.skipped_steps)
        states.append(engine.full_state_dict())
    engine.check_holders()
    assert engine.deepspeed.skipped_steps == engine.skipped_steps
    assert engine.deepspeed.global_steps == engine.global_steps == 4
    if dist.get_rank():
        return skipped, True, True
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(states)]
    return skipped, same == [False, True, False, False], all(bool(torch.isfinite(t).all()) for t in states[-1].values())


def offloaded(stage: int, offload: bool = True) -> dict[str, Any]:
    """Sections that put the optimizer of a case into host memory."""
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}} if offload else {}


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, True), (3, False), (3, True)])
def test_a_nan_in_one_group_makes_all_skip_the_step(ranks: RankPool, stage: int, offload: bool) -> None:
    for skipped, only_then, finite in ranks.run(_nan_in_one_group, stage, offload, world=4):
        assert skipped == [0, 1, 1, 1]
        assert only_then and finite


def _offloaded(case: Case) -> Result:
    return train(case, "deepspeed", **offloaded(case.stage))


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_optimizers_equal_the_reference(ranks: RankPool, stage: int) -> None:
    case = Case(2, 2, stage=stage, accumulation=3, clip=True, optimizer="adamw")
    assert_same_run(ranks.run(_offloaded, case, world=4), reference(case), case)
