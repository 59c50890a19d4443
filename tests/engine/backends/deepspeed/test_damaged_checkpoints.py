"""DeepSpeed checkpoints that are damaged or hostile."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.errors import CheckpointError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


DAMAGED = {
    "empty": {},
    "a list": [],
    "no partitions": {"optimizer_state_dict": {"zero_stage": 1, "partition_count": 1}},
    "a number": 1,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_checkpoint_of_deepspeeds_is_told_in_one_line(tmp_path: Path, content: Any) -> None:
    from sdp.engine.backends.deepspeed.zero_checkpoint import is_zero_checkpoint, weights_of_zero_checkpoint

    (tmp_path / "latest").write_text("step")
    (tmp_path / "step").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(content, tmp_path / "step" / name)
    assert is_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        weights_of_zero_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="latest: must name the checkpoint to read, but it is not text"):
        is_zero_checkpoint(tmp_path)


def test_a_checkpoint_of_deepspeeds_leads_nowhere_else_and_does_not_hang(tmp_path: Path) -> None:
    from sdp.engine.backends.deepspeed.zero_checkpoint import is_zero_checkpoint, weights_of_zero_checkpoint

    for tag in ("../step", "/etc", "a/b"):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match=r"latest: the tag .* is not the name of one directory"):
            is_zero_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step")
    (tmp_path / "step").mkdir()
    os.mkfifo(tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert is_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"optim_states\.pt: is not a regular file"):
        weights_of_zero_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert not is_zero_checkpoint(tmp_path)


def test_what_others_put_into_torch_stays() -> None:
    from sdp.engine.backends.deepspeed.private import forget_process_groups, load

    load()
    zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    own = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.InsertPostInitMethodToModuleSubClasses, "linear_bk", own, raising=False)
        for there, then in ((zero.zero3_linear_wrap, own), (somebody := lambda *given: own(*given), somebody)):
            patch.setattr(torch.nn.functional, "linear", there)
            forget_process_groups()
            assert torch.nn.functional.linear is then
