"""FSDP2 equals the oracle in every value of a run, and has the predicted state."""

import itertools
from dataclasses import replace

import pytest
import torch
from sdp.engine.placement.placement import LEAST_BYTES
from sdp.tests.support import models
from sdp.tests.support.case_tables import FACTORS, mostly_slow, pairwise_cover
from sdp.tests.support.cases import (
    Case,
    assert_same_gradients,
    assert_same_run,
    assert_same_statistics,
    assert_state_as_predicted,
    native,
    only_parameters,
    oracle,
    train,
    train_in_pieces,
)
from sdp.tests.support.ranks import RankPool

COVER = pairwise_cover(FACTORS)
MORE = [
    Case(2, 4, 3, model="llama-tied-meta", masking="backward"),  # 10 rows are cut in four: 3, 3, 3 and 1
    Case(2, 4, 1, 3, model="swin-meta", masking="backward"),  # 6 rows: 2, 2, 2 and none
    Case(4, 1, neurons=2, model="llama-of-3", stage=2, optimizer="adamw", masking="backward", placement="balanced"),
    Case(2, 2, stage=1, neurons=5, model="even-llama-tied", placement="cyclic", masking="backward"),
    Case(2, 1, neurons=2, tp=2, lr_scale="0.7", model="wide-llama", masking="backward"),
    Case(2, 2, 3, model="llama-meta", masking="backward", placement="contiguous"),
    Case(4, 1, 1, 3, model="llama-tied-meta", masking="backward", placement="contiguous", clip=True),
    Case(2, 1, tp=2, model="wide-llama-tied", masking="backward", placement="contiguous", checkpointing="full"),
    Case(2, 2, 3, 2, model="modern-llama-meta", tp=2, clip=True, optimizer="adamw"),
    Case(2, 1, neurons=2, model="modern-llama", tp=1, placement="cyclic", checkpointing="selective"),
    Case(2, 2, 2, neurons=2, model="modern-llama-meta", masking="backward"),
    # Parameters that only some micro-batches use, or some ranks.
    Case(2, 1, 0, 2, model="experts"),
    Case(2, 2, 3, 2, model="experts"),
    Case(1, 2, 1, 2, model="experts-by-rank", placement="full"),
    Case(2, 1, 0, 2, model="experts-by-rank"),
]


def test_the_cover_has_few_cases_and_many_pairs() -> None:
    assert len(COVER) < 90
    kinds = {(case.neurons > 0, case.masking, case.stage, case.tp > 1) for case in COVER}
    for factors in itertools.combinations(range(4), 2):
        seen = [{kind[factor] for kind in kinds} for factor in factors]
        assert {tuple(kind[factor] for factor in factors) for kind in kinds} == set(itertools.product(*seen))


# spec/test_ddp.py trains groups of four ranks.
@pytest.mark.parametrize("case", mostly_slow([*COVER, *MORE], elsewhere={("fsdp", "4")}), ids=str)
def test_fsdp2_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    ours, theirs = native(ranks, case), oracle(case)
    parameters, statistics = only_parameters(theirs, case.model), set(theirs.after or {})
    assert_same_gradients(ours, theirs)
    assert_same_run([only_parameters(result, case.model) for result in ours], parameters, case)
    assert_same_statistics(ours, theirs, statistics - set(parameters.after or {}))
    assert_state_as_predicted(ours)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 0, bf16=True),
        pytest.param(Case(2, 2, 1, 2, bf16=True, model="llama-tied"), marks=pytest.mark.slow),
        Case(2, 1, 3, 2, bf16=True, model="even-llama-tied", tp=2),
        Case(2, 1, 0, bf16=True, model="even-llama", neurons=3),
        Case(2, 2, 3, 2, bf16=True, model="even-llama-tied-meta", neurons=2, masking="backward"),
        Case(2, 1, 0, bf16=True, model="resnet-meta"),
        Case(2, 2, 2, bf16=True, model="swin-meta", checkpointing="full"),
    ],
    ids=str,
)
def test_bf16_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    """Both compute in bfloat16 from the same weights, so they differ by round-off of 2⁻⁹ per
    operation, and less than from float32.

    The numbers of micro-batches are powers of two, so that it does not matter where one divides.
    """
    ours, theirs, exact = native(ranks, case), oracle(case), oracle(replace(case, bf16=False))
    assert_state_as_predicted(ours)
    assert ours[0].after is not None and theirs.after is not None and theirs.before is not None
    assert exact.after is not None
    assert ours[0].norms == pytest.approx(theirs.norms, rel=2e-2)
    squared = {"difference": 0.0, "rounding": 0.0, "update": 0.0}
    for name in dict(models.build(case.model).named_parameters()):
        after = theirs.after[name]
        assert ours[0].after[name].dtype == torch.float32, "master weights stay float32"
        squared["difference"] += (ours[0].after[name] - after).square().sum().item()
        squared["rounding"] += (exact.after[name] - after).square().sum().item()
        squared["update"] += (after - theirs.before[name]).square().sum().item()
    difference, rounding, update = (squared[key] ** 0.5 for key in ("difference", "rounding", "update"))
    assert difference < 1e-2 * update
    assert difference < 2 * rounding, "the two differ more from each other than bfloat16 differs from float32"


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 3, 3, clip=True, model="llama-tied-meta"),
        Case(2, 1, 0, clip=True, neurons=2, masking="backward", model="even-llama"),
    ],
    ids=str,
)
def test_units_that_are_reduced_in_pieces_train_alike(ranks: RankPool, case: Case) -> None:
    """Units of tests are smaller than the smallest bucket. Here they are cut as large ones are."""
    whole = ranks.run(train_in_pieces, replace(case, steps=1), LEAST_BYTES, world=case.world)
    pieces = ranks.run(train_in_pieces, case, 1, world=case.world)
    for (_, few), (_, many) in zip(whole, pieces, strict=True):
        assert many > 1.5 * few > 0
    assert_same_run([result for result, _ in pieces], oracle(case), case)
    assert_state_as_predicted([result for result, _ in pieces])


@pytest.mark.usefixtures("one_rank")
def test_a_norm_below_the_limit_is_not_clipped() -> None:
    case = Case(1, placement="full")
    plain = train(case)
    limited = train(case, gradient_clipping=2 * max(plain.norms))
    assert plain.after is not None and limited.after is not None
    assert all(torch.equal(limited.after[name], weight) for name, weight in plain.after.items())
