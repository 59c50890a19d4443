"""Gathering the full model from the groups that hold its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.full_model.gather import stream_full_state
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of
from sdp.tests.support.ranks import RankPool


def gather(case: Case) -> tuple[list[tuple[str, Any]], int]:
    """Stream the full model; return it as this rank sees it, and the bytes that were gathered in
    groups.
    """
    engine = engine_of(case)
    engine.traffic.reset()
    streamed = list(stream_full_state(engine.store))
    gathered = engine.traffic.buffers("inside groups")
    dist.barrier()
    return streamed, sum(gathered.values())


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, placement="mixed"),  # only group 1 holds the last layer
        Case(2, 2, stage=3, placement="mixed"),  # and shards are padded
        Case(2, 2, stage=3, neurons=3, model="llama-tied"),  # neurons of one matrix come from two groups
    ],
    ids=str,
)
def test_rank_0_receives_every_tensor_and_no_other_rank_does(ranks: RankPool, case: Case) -> None:
    first, *others = ranks.run(gather, case, world=case.world)
    expected = dict(models.build(case.model).named_parameters())
    received = dict(first[0])
    assert set(received) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(received[name].cpu(), parameter), name
    for streamed, _ in others:
        assert [name for name, _ in streamed] == list(received)  # all take part in the same order
        assert all(tensor is None for _, tensor in streamed)


def test_only_groups_of_several_ranks_gather_inside(ranks: RankPool) -> None:
    assert all(sent == 0 for _, sent in ranks.run(gather, Case(2, 1), world=2))
    assert all(sent > 0 for _, sent in ranks.run(gather, Case(2, 2, stage=3), world=4))
