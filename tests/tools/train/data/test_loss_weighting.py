"""``training.loss_weighting`` of ``sdp train``, with samples whose numbers of labels differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.tests.support.small_runs import read_losses, write_config
from sdp.tools.cli import main
from sdp.tools.runs.dataset import Corpus
from sdp.tools.train import startup


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
    """Train for two steps; return the losses."""
    config["sdp"] = {"groups": 1}
    config["train_micro_batch_size_per_gpu"] = 2
    config["scheduler"] = None
    config["training"] |= {"steps": 2, "evaluate_every": 0, "save_every": 0}
    opened = startup.open_corpus

    def train(name: str, masks: bool, *words: str) -> list[float]:
        def masked(*args: Any) -> Corpus:
            corpus = opened(*args)
            return replace(corpus, train=Masked(corpus.train), masks_labels=masks)

        monkeypatch.setattr(startup, "open_corpus", masked)
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
