"""Losses of runs on text: documents kept apart, weights by labels, and one that is NaN."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.data.prepare import prepare
from sdp.tests.support.small_runs import read_losses, write_config
from sdp.tools.cli import main
from sdp.tools.runs.dataset import Corpus
from sdp.tools.train import rank


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
    config |= {"train_batch_size": 4, "sdp": {"groups": 1}}
    run = ["train", str(write_config(config, tmp_path)), "--dump-dir"]
    for name, mask in (("masked", "true"), ("plain", "false")):
        assert main([*run, str(tmp_path / name), "--set", f"data.document_mask={mask}"]) == 0
    assert read_losses(tmp_path / "plain")[0] != pytest.approx(read_losses(tmp_path / "masked")[0], rel=1e-5)


def test_a_mask_without_meaning_is_refused(config, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config["data"] = {"name": "digits", "document_mask": True}
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert 'data: document_mask is for tokens, and data.name is "digits"' in capsys.readouterr().err


# -- a held-out loss that is NaN is written as null, and ends nothing ------------------------------


def test_a_held_out_loss_that_is_nan_ends_nothing(config: dict, tmp_path: Path, capsys) -> None:
    """Weights that are finite, but so large that the forward pass overflows."""
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 1e20}}, "gradient_clipping": 0.0}
    config.pop("scheduler", None)
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 1, "evaluate_every": 1, "save_every": 0}
    run = tmp_path / "run"
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(run)]) == 0
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    assert lines[0]["loss"] > 0 and lines[-1]["loss"] is None
    assert main(["report", str(run)]) == 0
    assert "full model, before" in capsys.readouterr().out


# -- ``training.loss_weighting`` of ``sdp train``, with samples whose numbers of labels differ -----


class Masked(torch.utils.data.Dataset):
    """Ignores the labels of a part of each sample."""

    def __init__(self, samples: Any):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = dict(self.samples[index])
        sample["labels"] = sample["labels"].clone()
        sample["labels"][: 7 * index % 30] = -100
        return sample


@pytest.fixture
def losses(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config["sdp"] = {"groups": 1}
    config["train_micro_batch_size_per_gpu"] = 2
    config["scheduler"] = None
    config["training"] |= {"steps": 2, "evaluate_every": 0, "save_every": 0}
    opened = rank.open_corpus

    def train(name: str, masks: bool, *words: str) -> list[float]:
        def masked(*args: Any) -> Corpus:
            corpus = opened(*args)
            return replace(corpus, train=Masked(corpus.train), masks_labels=masks)

        monkeypatch.setattr(rank, "open_corpus", masked)
        path = write_config(config, tmp_path)
        assert main(["train", str(path), "--dump-dir", str(tmp_path / name), *words]) == 0
        return read_losses(tmp_path / name)

    return train


def test_losses_weigh_their_labels_if_the_data_mask_some(losses):
    by_default = losses("default", True)
    assert by_default == losses("tokens", False, "--set", "training.loss_weighting=tokens")
    means_of_means = losses("ranks", True, "--set", "training.loss_weighting=ranks")
    assert means_of_means == losses("unmasked", False)
    assert means_of_means[0] != pytest.approx(by_default[0], rel=1e-4)
