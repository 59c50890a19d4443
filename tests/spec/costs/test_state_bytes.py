"""Bytes of parameters, gradients and optimizer state: measured equals predicted, and predicted
equals arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
from sdp.tests.support import models
from sdp.tests.support.cases import Case, native, reference
from sdp.tests.support.ranks import RankPool

TABLE = [
    *(Case(2, 2, stage, optimizer="adamw") for stage in range(4)),
    *(Case(2, 2, stage, optimizer="momentum", steps=2) for stage in (0, 3)),
    Case(4, 2, 3, 3, placement="profile", model="llama-tied-meta"),
    Case(1, 4, 2, 1, placement="full", model="llama-meta", optimizer="adamw"),
    Case(2, 2, 3, 3, bf16=True, model="llama-tied"),
    Case(2, 2, 3, 1, optimizer="adamw", model="even-llama-tied-meta", tp=2),
    Case(2, 1, 0, 1, optimizer="adamw", model="even-llama", tp=2),
    *(Case(2, 2, stage, 3, model="llama-tied-meta", bf16=True, masking="backward") for stage in (1, 3)),
    Case(4, 2, 0, masking="backward"),
    Case(2, 1, 0, 1, optimizer="adamw", model="even-llama", tp=2, masking="backward"),
]


# tests/spec/test_equality.py compares the same in every pair of such settings.
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full_table) for case in TABLE], ids=str)
def test_measured_equals_predicted(ranks: RankPool, case: Case) -> None:
    for rank, result in enumerate(native(ranks, case)):
        assert result.measured == result.predicted, f"rank {rank}"


@pytest.mark.parametrize(
    ("optimizer", "tensors", "copies"),
    [("sgd", 0, None), ("momentum", 1, None), ("adamw", 2, None), ("adamw", 2, 4), ("sgd", 0, 2)],
)
def test_prediction_by_hand(ranks: RankPool, optimizer: Any, tensors: int, copies: int | None) -> None:
    """Group 0 of two lacks the last of four equal blocks, group 1 the first; ``copies`` of it take
    so many bytes an element.
    """
    case = Case(2, 1, optimizer=optimizer, steps=2, masking="backward" if copies else "forward", bf16=copies == 2)
    everything = sum(p.numel() for p in models.mlp().parameters())
    block = sum(p.numel() for p in models.Block().parameters())
    held = everything - block
    expected = {
        "parameters": 4 * held,
        "gradients": 4 * held,
        "optimizer": 4 * held * tensors,
        "frozen": block * (copies or 0),
    }
    assert [result.measured for result in native(ranks, case)] == [expected, expected]
    assert [result.predicted for result in native(ranks, case)] == [expected, expected]
    assert reference(case).measured == reference(case).predicted
    assert reference(case).measured["parameters"] == 4 * everything
    assert reference(case).measured["frozen"] == 0


def test_shards_of_a_group_add_up(ranks: RankPool) -> None:
    results = native(ranks, Case(1, 4, 3, placement="full"))
    everything = 4 * sum(p.numel() for p in models.mlp().parameters())
    sizes = [result.measured["parameters"] for result in results]
    assert sum(sizes) == everything
    assert sizes[3] < sizes[0], "13 rows are cut as 4, 4, 4, 1"
