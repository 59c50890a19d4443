"""Runs that keep the documents of a sample apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdp.data.prepare import prepare
from sdp.tests.support.small_runs import read_losses, run_sdp, write_config
from sdp.tools.cli import main


@pytest.fixture
def short_documents(tmp_path: Path) -> Path:
    """Documents of 20 to 30 bytes, so that every sample of 64 holds several."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(400):
        (folder / f"{number}.txt").write_text(f"document {number} of many {number * number}")
    prepare([str(folder / "*.txt")], tmp_path / "shards", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    return tmp_path / "shards"


def test_a_document_mask_changes_the_loss(config, short_documents: Path, tmp_path: Path):
    config["data"] = {"path": str(short_documents), "document_mask": True, "sequence_length": 64}
    config["model"]["max_position_embeddings"] = 64
    config["training"] |= {"steps": 2, "evaluate_every": 2, "evaluate_batches": 1, "save_every": 0}
    config |= {"train_batch_size": 4}
    run = ["train", str(write_config(config, tmp_path)), "--dump-dir"]
    for name, mask in (("masked", "true"), ("plain", "false")):
        finished = run_sdp(*run, tmp_path / name, "--set", f"data.document_mask={mask}")
        assert finished.returncode == 0, finished.stderr
    assert read_losses(tmp_path / "plain")[0] != pytest.approx(read_losses(tmp_path / "masked")[0], rel=1e-5)


def test_a_mask_without_meaning_is_refused(config, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config["data"] = {"name": "digits", "document_mask": True}
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert 'data: document_mask is for tokens, and data.name is "digits"' in capsys.readouterr().err
