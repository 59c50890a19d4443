"""Arguments of ``sdp.initialize`` about torch.distributed, and the names of errors of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest
import sdp
import torch
from sdp.engine import errors

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 1}}


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"distributed_port": 1}, "distributed_port 1 cannot be honoured"),
        ({"dist_init_required": False}, "sdp.init_dis"),
    ],
)
def test_refuses_what_it_cannot_honour(argument: dict[str, Any], match: str) -> None:
    with pytest.raises(sdp.ConfigError, match=match):
        sdp.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, **argument)


def test_earlier_names_of_errors_stay() -> None:
    assert errors.DivergedError is errors.NonFiniteError is sdp.NonFiniteError
    assert errors.DivergenceError is errors.HolderMismatchError is sdp.HolderMismatchError is sdp.DivergenceError
