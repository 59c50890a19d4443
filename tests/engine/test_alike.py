"""What every rank must have alike is compared before any waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import ranks_models as models
import sdp
import torch
import torch.distributed as dist
from ranks import RankPool
from ranks_cases import Case
from sdp.engine.errors import ConfigError


def _start(kind: str, engine: str) -> str:
    """The error of a rank, of which the last differs in ``kind``."""
    last = dist.get_rank() == dist.get_world_size() - 1
    config = Case(2, 1, placement="cyclic").config(engine)
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}},
        "gradient_clipping": {"gradient_clipping": 0.5},
        "seed": {"training": {"seed": 1}},
        "own affairs": {"steps_per_print": 3, "data": {"num_workers": 1}, "training": {"save_every": 7}},
    }
    config |= changes.get(kind, {}) if last else {}
    model = models.Mlp()
    if kind == "model" and last:
        model.head = torch.nn.Linear(models.WIDTH, models.OUT + 1)
    samples = [{"x": torch.zeros(1)}] * (12 if kind == "data" and last else 24)
    given: dict[str, Any] = {"training_data": samples}
    if kind == "rate":
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.2 if last else 0.1)
        del config["optimizer"], config["scheduler"]
    try:
        sdp.initialize(model=model, config=config, **given)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("optimizer", "optimizer: ranks have different values"),
        ("gradient_clipping", "gradient_clipping: ranks have different values"),
        ("seed", "training.seed: ranks have different values"),
        ("model", "the model's parameters: ranks have different values"),
        ("rate", "the learning rates: ranks have different values"),
        ("data", "the samples of training_data, which the loader shares out: ranks have different values"),
        ("own affairs", ""),
    ],
)
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_a_rank_that_differs_stops_all(ranks: RankPool, engine: str, kind: str, message: str) -> None:
    answers = ranks.run(_start, kind, engine, world=2, timeout=60)
    assert answers[0] == answers[1]
    assert answers[0].startswith(message)
    assert bool(answers[0]) == bool(message)
