"""The DeepSpeed backend equals the reference; with one group it is DeepSpeed as it comes."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import RankPool
from ranks_cases import Case, Result, assert_same_run, reference, train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _train(case: Case) -> Result:
    return train(case, "deepspeed")


def deepspeed(ranks: RankPool, case: Case) -> list[Result]:
    """The run by rank."""
    return ranks.run(_train, case, world=case.world)


COVER = [
    Case(2, 2, stage=0, accumulation=3, clip=True, model="llama-tied"),
    Case(2, 2, stage=1, accumulation=1, clip=True, optimizer="adamw"),
    Case(2, 2, stage=2, accumulation=3, model="llama-tied-meta"),
    Case(2, 2, stage=3, accumulation=3, clip=True, optimizer="adamw", model="llama-tied-meta"),
]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_deepspeed_equals_the_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(deepspeed(ranks, case), reference(case), case)
