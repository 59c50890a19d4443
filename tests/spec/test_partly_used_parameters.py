"""Parameters that only some micro-batches use: experts, and one of several heads."""

import pytest
from sdp.tests.support.cases import Case, Result, native
from sdp.tests.support.foreign.plain_torch import train_plainly
from sdp.tests.support.ranks import RankPool

PLAIN = [
    Case(2, 2, stage=stage, accumulation=2, model=model, bf16=bf16)
    for stage, model, bf16 in [
        *((stage, "experts", True) for stage in (0, 1, 2, 3)),
        (0, "experts-by-rank", True),
        (3, "experts-by-rank", True),
        (0, "experts", False),
        (3, "experts-by-rank", False),
    ]
]


@pytest.mark.parametrize(
    "case",
    [  # each stage, either model and either precision
        case
        if str(case.model) + str(case.stage) in ("experts1", "experts2", "experts-by-rank3") or not case.bf16
        else pytest.param(case, marks=pytest.mark.slow)
        for case in PLAIN
    ],
    ids=str,
)
def test_native_equals_plain_torch(ranks: RankPool, case: Case) -> None:
    assert_equal_to_plain_torch(native(ranks, case)[0], case)


def assert_equal_to_plain_torch(ours: Result, case: Case) -> None:
    """Compare weights in float32 to 1e-5, and in bf16 to 2 % of what training changed in each.

    bfloat16 keeps 8 bits, so each operation rounds by up to 0.2 %. A gradient goes through about
    ten of them, whose errors add up like random numbers: 0.6 %.
    """
    assert ours.before is not None and ours.after is not None
    for name, expected in train_plainly(case, ours.rates).items():
        update = (expected - ours.before[name]).norm().item()
        error = (ours.after[name] - expected).norm().item()
        assert error <= (2e-2 * update if case.bf16 else 1e-5 * expected.norm().item()), (name, error, update)
        assert update > 0, name
