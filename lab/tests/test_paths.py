"""``python -m lab.paths``: a corpus that tells the cluster, and losses after prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sdp.data.clusters import Router, make_clusters, read_clusters
from sdp.data.prepare import prepare
from sdp.data.shards import TokenDataset
from sdp.lab.paths import after_prompt, label, with_prompt


def router_of_two(prefix: int) -> Router:
    """Cluster 0 likes the pair (0, 0), and cluster 1 the pair (1, 1)."""
    pairs = np.log(np.array([[0.9, 0.1, 0.5, 0.5], [0.5, 0.5, 0.1, 0.9]], np.float32))
    return Router(prefix, 2, pairs, np.zeros((2, 2), np.float32), np.array([0.2, -0.2], np.float32))


def test_losses_after_a_prompt_are_those_of_the_chosen_path() -> None:
    tokens = torch.tensor([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    losses = torch.arange(20.0).view(2, 2, 5)  # of tokens 1 to 5, under two paths
    router, found = router_of_two(4), after_prompt(router_of_two(4), tokens, losses, 3)
    assert found["loss"] == pytest.approx(np.mean([2, 3, 4, 17, 18, 19]))  # tokens 3, 4 and 5
    assert found["best single path"] == pytest.approx(np.mean([2, 3, 4, 7, 8, 9]))
    assert found["best path in hindsight"] == pytest.approx(np.mean([2, 3, 4, 7, 8, 9]))
    scores = [2 * np.log([0.9, 0.5]), 2 * np.log([0.5, 0.9])] + router.biases * 2 / 3
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    rest = losses[:, :, 2:].numpy().astype(np.float64)
    wanted = -np.log((weights.T[..., None] * np.exp(-rest)).sum(0)).mean()
    assert found["ensemble"] == pytest.approx(wanted, rel=1e-6)
    assert after_prompt(router, tokens, losses[:1], 3) == {"loss": pytest.approx(5.5)}


def test_biases_grow_with_the_prompt() -> None:
    router = router_of_two(5)
    assert with_prompt(router, 5).biases == pytest.approx(router.biases)
    longer = with_prompt(router, 9)
    assert longer.prefix == 9 and longer.biases == pytest.approx(2 * router.biases)


def test_a_corpus_that_tells_the_cluster(tmp_path: Path) -> None:
    for number in range(40):
        text = " ".join([str(number * 977)] * 60) if number % 2 else "the cat sat under green trees " * 10
        (tmp_path / f"{number}.txt").write_text(text)
    prepare([str(tmp_path / "*.txt")], tmp_path / "corpus", tokenizer="bytes", held_out=0.2, progress=False)
    make_clusters(tmp_path / "corpus", 2, 16, 32, progress=False)
    label(tmp_path / "corpus", tmp_path / "labelled")
    for split in ("train", "held_out"):
        plain, labelled = TokenDataset(tmp_path / "corpus", split, 32), TokenDataset(tmp_path / "labelled", split, 33)
        labelled.verify()
        assert len(plain) == len(labelled) and labelled.vocab_size == plain.vocab_size + 2
        clusters = read_clusters(plain)
        for item in range(len(plain)):
            first, *rest = labelled[item]["input_ids"].tolist()
            assert (first, rest) == (257 + int(clusters[item]), plain[item]["input_ids"].tolist())
