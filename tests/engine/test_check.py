"""``sdp.check``: it passes what is right, and finds a wrong gradient and holders that differ."""

from __future__ import annotations

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import ConfigError, HolderMismatchError
from sdp.tests.support import models
from sdp.tests.support.cases import zero_of
from sdp.tests.support.ranks import RankPool
from torch import nn


def engine_of(
    kind: str, stage: int, groups: int, engine: str = "fsdp2", capacity: float = 1.0, more: Any = None
) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.25,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "no_decay": ["biases"]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": zero_of(stage),
        "sdp": {"groups": groups, "capacity": capacity, "engine": engine, "check_interval": 0},
        **(more or {}),
    }
    return sdp.initialize(model=models.build(kind), config=config)[0]


def batches(kind: str) -> list[Any]:
    return [models.micro_batch(kind, step, micro, dist.get_rank()) for step in range(3) for micro in range(2)]


def checked(kind: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    engine = engine_of(kind, *args, more=more)
    found = sdp.check(engine, batches(kind))
    return found.steps, found.difference, found.norm_difference, found.why_not


@pytest.mark.parametrize(
    ("kind", "args", "more"),
    [
        ("mlp", (0, 2), {}),
        ("llama", (3, 1), {"training": {"loss_weighting": "tokens"}}),
        ("mlp", (2, 1, "deepspeed"), {}),
        ("mlp", (2, 2), {"bf16": {"enabled": True}}),
    ],
)
def test_the_engine_equals_plain_torch(ranks: RankPool, kind: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
    for steps, difference, norm_difference, why_not in ranks.run(checked, kind, args, more, world=2):
        assert (steps, why_not) == (3, "")
        assert difference < (0.1 if "bf16" in more else 1e-4)
        assert norm_difference < (0.02 if "bf16" in more else 1e-5)


def _wrong() -> float:
    engine = engine_of("mlp", 0, 2)
    honest = engine.backward
    engine.backward = lambda loss: honest(loss * 0.9)  # which Adam and clipping hide
    return sdp.check(engine, batches("mlp")).norm_difference


def test_a_wrong_gradient_shows(ranks: RankPool) -> None:
    assert all(difference > 0.05 for difference in ranks.run(_wrong, world=2))


def _subnetworks() -> str:
    engine = engine_of("mlp", 0, 2, capacity=0.75)
    found = sdp.check(engine, batches("mlp"))
    with torch.no_grad():
        next(iter(engine.module.parameters())).mul_(1 + dist.get_rank())
    with pytest.raises(HolderMismatchError):
        sdp.check(engine, batches("mlp")[:2])
    with pytest.raises(ConfigError, match="a step needs 2 batches on each rank, but 1 were given"):
        sdp.check(engine, batches("mlp")[:1])
    assert found.difference is None
    return found.why_not


def _dropout() -> list[str]:
    engine = engine_of("mlp", 0, 2)
    said = []
    for rate in (0.0, 0.5):
        engine.module.stem.add_module("drop", nn.Dropout(rate))
        said.append(sdp.check(engine, batches("mlp")[:2]).why_not)
    return said


def test_random_numbers_are_not_compared(ranks: RankPool) -> None:
    why = "plain torch draws other random numbers; weights can be compared only without stem.drop.p 0.5"
    assert ranks.run(_dropout, world=2) == [["", why]] * 2


def test_holders_are_compared_at_any_capacity(ranks: RankPool) -> None:
    assert all("only capacity 1.0 can be compared" in text for text in ranks.run(_subnetworks, world=2))
