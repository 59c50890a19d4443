"""Parameters that only some micro-batches use, under DeepSpeed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from sdp.engine.errors import ModelError
from sdp.tests.support.cases import Case, assert_same_run, oracle, train
from sdp.tests.support.deepspeed_runs import offload_settings, run_under_deepspeed
from sdp.tests.support.foreign.plain_torch import train_plainly
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, 2, stage=1, accumulation=2, model="experts"), marks=pytest.mark.slow),
        pytest.param(Case(1, 2, stage=3, accumulation=2, model="experts"), marks=pytest.mark.slow),
        Case(2, 2, stage=3, accumulation=2, model="experts"),
    ],
    ids=str,
)
def test_deepspeed_equals_the_oracle_and_plain_torch(ranks: RankPool, case: Case) -> None:
    ours = run_under_deepspeed(ranks, case)
    assert_same_run(ours, oracle(case), case)
    after = ours[0].after
    assert after is not None
    for name, expected in train_plainly(case, ours[0].rates).items():
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def _refusal(case: Case, offload: bool) -> str:
    with pytest.raises(ModelError) as caught:
        train(case, "deepspeed", **offload_settings(case.stage, offload))
    return str(caught.value)


@pytest.mark.parametrize(
    "case", [Case(2, 2, stage=stage, accumulation=2, model="experts-by-rank") for stage in (1, 3)], ids=str
)
def test_ranks_that_use_different_parameters_are_refused(ranks: RankPool, case: Case) -> None:
    """DeepSpeed adds up the gradients of different experts. Every rank refuses."""
    for message in ranks.run(_refusal, case, False, world=case.world):
        assert "the ranks of a group use different parameters" in message and "layers." in message


@pytest.mark.parametrize(
    "case", [Case(1, 2, stage=stage, accumulation=2, model="experts") for stage in (2, 3)], ids=str
)
def test_offload_is_refused(ranks: RankPool, case: Case) -> None:
    """With offload, DeepSpeed loses the gradients of experts that the last micro-batch does not
    use.
    """
    for message in ranks.run(_refusal, case, True, world=case.world):
        assert "only some micro-batches use all parameters" in message and "offload_optimizer" in message
