"""Bytes of parameters, gradients and optimizer state: measured equals predicted, and predicted equals arithmetic."""

from __future__ import annotations

import pytest
import ranks_models as models
from ranks import RankPool
from ranks_cases import Case, native, reference

TABLE = [
    *(Case(2, 2, stage, optimizer="adamw") for stage in range(4)),
    *(Case(2, 2, stage, optimizer="momentum", steps=2) for stage in (0, 3)),
    Case(4, 2, 3, 3, placement="profile", model="llama-tied-meta"),
    Case(1, 4, 2, 1, placement="full", model="llama-meta", optimizer="adamw"),
    Case(2, 2, 3, 3, bf16=True, model="llama-tied"),
    Case(2, 2, 3, 1, optimizer="adamw", model="even-llama-tied-meta", tp=2),
    Case(2, 1, 0, 1, optimizer="adamw", model="even-llama", tp=2),
]


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_measured_equals_predicted(ranks: RankPool, case: Case) -> None:
    for rank, result in enumerate(native(ranks, case)):
        assert result.measured == result.predicted, f"rank {rank}"


@pytest.mark.parametrize(("optimizer", "tensors"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_prediction_by_hand(ranks: RankPool, optimizer: str, tensors: int) -> None:
    """Group 0 of two lacks the last of four equal blocks, group 1 the first."""
    case = Case(2, 1, optimizer=optimizer, steps=2)  # type: ignore[arg-type]
    everything = sum(p.numel() for p in models.mlp().parameters())
    held = everything - sum(p.numel() for p in models.Block().parameters())
    expected = {"parameters": 4 * held, "gradients": 4 * held, "optimizer": 4 * held * tensors}
    assert [result.predicted for result in native(ranks, case)] == [expected, expected]
    assert reference(case).measured == reference(case).predicted
    assert reference(case).measured["parameters"] == 4 * everything


def test_shards_of_a_group_add_up(ranks: RankPool) -> None:
    results = native(ranks, Case(1, 4, 3, placement="full"))
    everything = 4 * sum(p.numel() for p in models.mlp().parameters())
    sizes = [result.measured["parameters"] for result in results]
    assert sum(sizes) == everything
    assert sizes[3] < sizes[0], "13 rows are cut as 4, 4, 4, 1"
