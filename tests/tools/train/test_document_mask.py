"""Runs that keep the documents of a sample apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdp.tests.support.small_runs import read_losses, run_sdp, write_config
from sdp.tools.cli import main


def test_backends_agree_under_a_document_mask(config, text_corpus: Path, tmp_path: Path):
    config["data"] = {"path": str(text_corpus), "document_mask": True, "sequence_length": 768}
    config["model"]["max_position_embeddings"] = 768
    config["training"] |= {"steps": 2, "evaluate_every": 2, "evaluate_batches": 1, "save_every": 0}
    config |= {"train_batch_size": 4}
    run = ["train", str(write_config(config, tmp_path)), "--dump-dir"]
    native = run_sdp(*run, tmp_path / "native")
    assert native.returncode == 0, native.stderr
    for engine in ("reference", "vectorized"):
        assert main([*run, str(tmp_path / engine), "--set", f"sdp.engine={engine}"]) == 0
        assert read_losses(tmp_path / engine) == pytest.approx(read_losses(tmp_path / "native"), rel=1e-5)
    assert main([*run, str(tmp_path / "plain"), "--set", "sdp.engine=reference", "data.document_mask=false"]) == 0
    assert read_losses(tmp_path / "plain")[0] != pytest.approx(read_losses(tmp_path / "native")[0], rel=1e-5)


def test_a_mask_without_meaning_is_refused(config, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config["data"] = {"name": "digits", "document_mask": True}
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert 'data: document_mask is for tokens, and data.name is "digits"' in capsys.readouterr().err
