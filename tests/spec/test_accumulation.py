"""Accumulation boundaries, ``no_sync``, and the engine's counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, full_gradients, oracle
from sdp.tests.support.ranks import RankPool


def _counters() -> list[Any]:
    engine = engine_of(Case(2, 1, accumulation=3))
    assert engine.get_global_grad_norm() is None
    seen = []
    for micro in range(6):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.traffic.reset()
        engine.backward(engine(models.micro_batch("mlp", 0, micro, dist.get_rank())))
        engine.step()
        seen.append(
            (boundary, engine.traffic.total() > 0, engine.global_steps, engine.micro_steps, engine.global_samples)
        )
    facts = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    return [seen, facts, engine.world_size, engine.global_rank == dist.get_rank()]


def test_only_the_last_micro_batch_sends_and_steps(ranks: RankPool) -> None:
    for seen, facts, world, own_rank in ranks.run(_counters, world=2):
        assert seen == [
            (False, False, 0, 1, 0), (False, False, 0, 2, 0), (True, True, 1, 3, 12),
            (False, False, 1, 4, 12), (False, False, 1, 5, 12), (True, True, 2, 6, 24),
        ]  # fmt: skip
        assert facts == (12, 2, 3)
        assert (world, own_rank) == (2, True)


def _no_sync(stage: int) -> tuple[list[str], dict[str, torch.Tensor], int]:
    engine = engine_of(Case(2, 2, stage))
    messages = []
    engine.traffic.reset()
    with engine.no_sync():
        engine.backward(engine(models.micro_batch("mlp", 0, 0, dist.get_rank())) / 2)
        try:
            engine.step()
        except RuntimeError as error:
            messages.append(str(error))
    between = engine.traffic.by_kind().get("between groups/all_reduce", 0)
    try:
        engine.step()
    except RuntimeError as error:
        messages.append(str(error))
    engine.backward(engine(models.micro_batch("mlp", 0, 1, dist.get_rank())) / 2)
    return messages, full_gradients(engine), between


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_accumulates_without_sending(ranks: RankPool, stage: int) -> None:
    expected = oracle(Case(2, 2, accumulation=2, steps=1)).gradients
    assert expected is not None
    for messages, gradients, between in ranks.run(_no_sync, stage, world=4):
        assert "inside no_sync()" in messages[0]
        assert "needs a backward() before it, outside no_sync()" in messages[1]
        assert between == 0
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * expected[name].abs().max().item())
