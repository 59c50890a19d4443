"""Parameters that only some micro-batches use: experts, and one of several heads."""

from __future__ import annotations

import pytest
from sdp.tests.support.cases import Case, assert_same_run, native, reference
from sdp.tests.support.ranks import RankPool

CASES = [
    Case(groups, fsdp, stage=stage, accumulation=2, model=model)
    for groups, fsdp, stage, model in [
        (2, 1, 0, "experts"),
        (2, 2, 1, "experts"),
        (2, 2, 3, "experts"),
        (1, 2, 1, "experts-by-rank"),
        (1, 2, 3, "experts-by-rank"),
        (2, 1, 0, "experts-by-rank"),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_equals_the_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(native(ranks, case), reference(case), case)


@pytest.mark.parametrize("case", [Case(**{**vars(case), "bf16": True}) for case in CASES], ids=str)
def test_bf16_native_equals_the_reference(ranks: RankPool, case: Case) -> None:
    ours, theirs = native(ranks, case)[0], reference(case)
    assert ours.after is not None and theirs.after is not None and theirs.before is not None
    for name, after in theirs.after.items():
        update = (after - theirs.before[name]).norm().item()
        assert (ours.after[name] - after).norm().item() < 2e-2 * update, name
