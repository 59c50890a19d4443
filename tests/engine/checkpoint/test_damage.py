"""A damaged checkpoint is refused with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import engine_of
from sdp.tests.support.checkpoints import ALONE, reseal


def _damage(folder: Path, how: str) -> None:
    checkpoint = folder / "step-1"
    if how == "no state":
        (checkpoint / "state.json").unlink()
    elif how == "truncated state":
        (checkpoint / "state.json").write_text("{")
    elif how == "state without steps":
        (checkpoint / "state.json").write_text(json.dumps({"format": 1}))
    elif how == "other format":
        (checkpoint / "state.json").write_text(json.dumps({"format": 99}))
    elif how == "no metadata":
        (checkpoint / "metadata.json").unlink()
    elif how == "truncated metadata":
        (checkpoint / "metadata.json").write_bytes((checkpoint / "metadata.json").read_bytes()[:50])
    elif how == "no tensors":
        next(checkpoint.glob("*.distcp")).unlink()
    elif how == "truncated tensors":
        data = next(checkpoint.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:100])
    elif how == "one flipped bit":
        data = next(checkpoint.glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "changed step":
        state = (checkpoint / "state.json").read_text()
        (checkpoint / "state.json").write_text(state.replace('"global_steps": 1', '"global_steps": 2'))


DAMAGES = [
    "no state", "truncated state", "state without steps", "other format", "no metadata", "truncated "
                                                                                         "metadata", "no tensors",
    "truncated tensors", "one flipped bit", "changed step",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(small: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small)
    _damage(small, how)
    with pytest.raises(CheckpointError) as error:
        engine_of(ALONE).load_checkpoint(small)
    assert "step-1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["truncated metadata", "truncated tensors"])
def test_right_hashes_do_not_make_a_file_trusted(small: Path, how: str) -> None:
    _damage(small, how)
    reseal(small / "step-1")
    with pytest.raises(CheckpointError, match="step-1"):
        engine_of(ALONE).load_checkpoint(small)


def test_a_pointer_to_nothing_falls_back_and_says_so(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(ALONE)
    engine.load_checkpoint(small)
    engine.save_checkpoint(small, "step-9")
    shutil.rmtree(small / "step-9")
    assert engine.load_checkpoint(small)[0] == f"{small}/step-1"
    assert "step-9, which is gone: taking step-1" in caplog.text
    shutil.rmtree(small / "step-1")
    with pytest.raises(CheckpointError, match="step-9: is gone"):
        engine.load_checkpoint(small)
