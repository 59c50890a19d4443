"""A schedule of maskings under DeepSpeed equals the reference, and a resume equals the undisturbed
run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from sdp.tests.support.case_tables import (
    FACTORS,
    SCHEDULED_STEPS,
    THERE_AND_BACK,
    TO_BACKWARD,
    TO_FORWARD,
    mostly_slow,
    pairwise_cover,
)
from sdp.tests.support.cases import Case, Result, assert_same_run, oracle, train
from sdp.tests.support.checkpoints import assert_equal_runs, resumed
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

COVER = pairwise_cover(
    FACTORS
    | {"masking": [TO_BACKWARD, TO_FORWARD], "layout": [(2, 1, 1), (2, 2, 1)], "model": ["llama-tied-meta"]}
    | {"placement": ["mixed"], "optimizer": ["sgd", "adamw"], "neurons": [0, 3]}
    | {name: ["none"] for name in ("checkpointing", "branch_scale", "lr_scale")}
)
MORE = [
    Case(2, 2, stage=1, masking=TO_BACKWARD, steps=SCHEDULED_STEPS),
    Case(2, 2, stage=3, masking=TO_BACKWARD, steps=SCHEDULED_STEPS, optimizer="adamw"),
    pytest.param(
        Case(2, 2, 3, masking=THERE_AND_BACK, steps=SCHEDULED_STEPS, model="even-llama", neurons=2),
        marks=pytest.mark.slow,
    ),
    Case(2, 2, 0, masking=THERE_AND_BACK, steps=SCHEDULED_STEPS, optimizer="adamw"),
    Case(2, 1, 2, masking=TO_BACKWARD, steps=SCHEDULED_STEPS, model="llama", checkpointing="full"),
]


def test_the_cover_has_every_stage_with_blocks_and_neurons() -> None:
    assert {(case.stage, case.neurons > 0) for case in COVER} == {
        (stage, cut) for stage in range(4) for cut in (False, True)
    }
    assert len(COVER) < 16


@pytest.mark.parametrize("case", [*mostly_slow(COVER), *MORE], ids=lambda case: f"{case}-{case.masking[11:24]}")
def test_deepspeed_equals_the_reference(ranks: RankPool, case: Case) -> None:
    ours: list[Result] = ranks.run(train, case, "deepspeed", world=case.world)
    assert_same_run(ours, oracle(case), case)
    for rank, result in enumerate(ours):
        assert result.measured == result.predicted, f"rank {rank}"
        assert result.traffic == result.planned_steps, f"rank {rank}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(2, 2, 3, optimizer="adamw", model="even-llama", neurons=2, masking=TO_FORWARD), marks=pytest.mark.slow
        ),
        *(
            pytest.param(case, marks=pytest.mark.full_table)
            for case in (
                Case(2, 2, 3, optimizer="adamw", model="llama-tied-meta", masking=TO_BACKWARD),
                Case(2, 2, 1, optimizer="adamw", model="even-llama", neurons=2, masking=TO_FORWARD),
            )
        ),
        Case(2, 1, 0, optimizer="momentum", model="dropped", masking=TO_BACKWARD),
    ],
    ids=str,
)
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), "deepspeed", world=case.world))
