"""Bytes of parameters, gradients and optimizer state: measured equals predicted, and predicted
equals arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
from sdp.tests.support import models
from sdp.tests.support.cases import Case, native
from sdp.tests.support.ranks import RankPool


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


def test_shards_of_a_group_add_up(ranks: RankPool) -> None:
    results = native(ranks, Case(1, 4, 3, placement="full"))
    everything = 4 * sum(p.numel() for p in models.mlp().parameters())
    sizes = [result.measured["parameters"] for result in results]
    assert sum(sizes) == everything
    assert sizes[3] < sizes[0], "13 rows are cut as 4, 4, 4, 1"
