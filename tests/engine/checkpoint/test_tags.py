"""Tags: which ones are refused, and what ranks with different tags are told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch.distributed as dist
from sdp.engine.checkpoint.storage.directory import latest
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import engine_of
from sdp.tests.support.checkpoints import ALONE, load_alone, refusal_of_load
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


WRONG_TAGS = ["../x", "/etc", "a/b", "..", "", ".hidden", "latest.json", None, 3, ["step-1"]]


@pytest.mark.parametrize("tag", WRONG_TAGS, ids=str)
def test_the_pointer_names_an_entry_of_its_directory(small: Path, tag: Any) -> None:
    (small / "latest.json").write_text(json.dumps({"tag": tag}))
    assert "which is not a checkpoint of this directory; remove this file to resume from step-1" in refusal_of_load(
        small
    )


@pytest.mark.parametrize(
    "tag",
    [
        "latest.json",
        "state.json",
        "metadata.json",
        "a\0b",
        "a\nb",
        "a" * 5000,
        "..",
        ".",
        "",
        "/etc/x",
        "a/b",
        ".x",
        None,
        10**400,
        -(10**400),
        10**5000,
        math.nan,
        math.inf,
        "\udcff",
    ],
    ids=lambda tag: "huge" if isinstance(tag, int) else ascii(tag)[:20],
)
def test_a_wrong_tag_is_refused_before_anything_is_written(tmp_path: Path, tag: Any) -> None:
    engine = engine_of(ALONE)
    if tag is None:
        tag = ["step-1"]
    with pytest.raises(CheckpointError, match=r"the tag .* use letters, digits and dashes") as error:
        engine.save_checkpoint(tmp_path / "new", tag)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert not (tmp_path / "new").exists()


def test_a_number_is_a_tag_as_in_deepspeed(tmp_path: Path) -> None:
    engine_of(ALONE).save_checkpoint(tmp_path, 7)  # type: ignore[arg-type]
    assert latest(tmp_path) == "7"
    assert load_alone(tmp_path, 7)[0] == f"{tmp_path}/7"  # type: ignore[arg-type]
