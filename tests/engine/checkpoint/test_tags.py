"""Ranks that give different tags are told so, and do not wait for each other's directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import sdp
import torch.distributed as dist
from sdp.engine.errors import CheckpointError
from sdp.tests.support.models import mlp
from sdp.tests.support.ranks import RankPool


def _save(folder: str) -> str:
    engine = sdp.initialize(model=mlp(), config={"train_batch_size": 2, "sdp": {"groups": 2}})[0]
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
    return str(caught.value)


def test_different_tags_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    expected = "save_checkpoint: rank 0 has the tag 'tag-0', rank 1 has 'tag-1'; give all ranks one tag"
    assert ranks.run(_save, str(tmp_path), world=2) == [expected] * 2
    assert not list(tmp_path.iterdir())
