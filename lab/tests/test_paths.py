"""``python -m lab.paths``: training in one process, corpora with clusters, losses after prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sdp.data.clusters import Router, make_clusters, read_clusters
from sdp.data.prepare import prepare
from sdp.data.shards import TokenDataset
from sdp.engine.config.load import load_config
from sdp.lab.paths import PathsInTurn, after_prompt, label, with_prompt
from sdp.tools.cli import main
from sdp.tools.runs.dataset import open_corpus
from sdp.tools.runs.run_files import read_run


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


def make_corpus(folder: Path) -> None:
    """Write ``folder/corpus``, of two clusters."""
    for number in range(40):
        text = " ".join([str(number * 977)] * 60) if number % 2 else "the cat sat under green trees " * 10
        (folder / f"{number}.txt").write_text(text)
    prepare([str(folder / "*.txt")], folder / "corpus", tokenizer="bytes", held_out=0.2, progress=False)
    make_clusters(folder / "corpus", 2, 16, 32, progress=False)


def config_of(corpus: Path, own: list[str] | None) -> dict[str, Any]:
    """A run with two groups, of two paths or of the dense model."""
    model = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 2, "total_num_steps": 8, "decay_num_steps": 4}},
        "sdp": {"groups": 2, **({} if own is None else {"paths": {"count": 2, "own": own}})},
        "model": {"name": "llama", "tie_word_embeddings": True, **model},
        "data": {"path": str(corpus), "sequence_length": 32},
        "training": {"steps": 8, "seed": 1, "evaluate_batches": 2},
        "steps_per_print": 1,
    }


@pytest.mark.parametrize("own", [None, ["model.layers.1"]], ids=["dense", "paths"])
def test_a_run_in_one_process_is_that_of_real_processes(own: list[str] | None, tmp_path: Path) -> None:
    make_corpus(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path / "corpus", own)))
    config = load_config(tmp_path / "config.json")
    run = PathsInTurn(config, open_corpus(config, tmp_path))
    ours = [run.step() for _ in range(8)]
    assert main(["train", str(tmp_path / "config.json"), "--dump-dir", str(tmp_path / "run")]) == 0
    metrics = read_run(tmp_path / "run").metrics
    assert ours == pytest.approx([line["loss"] for line in metrics], rel=1e-5)
    assert metrics[0]["grad_norm"] > 0.5, "the clipping does nothing"


def test_independent_experts_share_nothing(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    config = load_config(config_of(tmp_path / "corpus", ["*"]))
    run = PathsInTurn(config, open_corpus(config, tmp_path))
    run.step()
    first, second = (dict(model.named_parameters()) for model in run.models)
    assert not any(torch.equal(parameter, second[name]) for name, parameter in first.items())


def test_a_corpus_that_tells_the_cluster(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    label(tmp_path / "corpus", tmp_path / "labelled")
    for split in ("train", "held_out"):
        plain, labelled = TokenDataset(tmp_path / "corpus", split, 32), TokenDataset(tmp_path / "labelled", split, 33)
        labelled.verify()
        assert len(plain) == len(labelled) and labelled.vocab_size == plain.vocab_size + 2
        clusters = read_clusters(plain)
        for item in range(len(plain)):
            first, *rest = labelled[item]["input_ids"].tolist()
            assert (first, rest) == (257 + int(clusters[item]), plain[item]["input_ids"].tolist())
