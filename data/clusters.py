"""Divides the sequences of a prepared corpus into clusters, one for each path of ``sdp.paths``.

A router chooses the cluster of a sequence from its first tokens, the prefix. The router has a
bigram model of tokens and a bias for each cluster. A prefix goes to the cluster with the highest
sum of log-likelihood and bias. The biases keep the clusters equally large.

Models and clusters are found by expectation-maximisation on a sample of prefixes (as in SMALLTALK
LM, arXiv 2410.03529, with smaller models): each model learns from the prefixes of its cluster, then
all prefixes are assigned again. The first assignment is by k-means on the counts of tokens. Of
several attempts, the router with the highest likelihood is kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from ..engine.errors import DataError
from .files import read_index, require_regular, sha256_of
from .index import SPLITS
from .output import only_writer, writing
from .shards import TokenDataset
from .tokenizers import Tokenizer, load_tokenizer

CLUSTERS = "clusters"  # folder in the directory of the prepared corpus
ROUTER_FILE, WEIGHTS_FILE = "router.json", "model.safetensors"
SAMPLE = 2**15  # prefixes from which the router learns
_BUCKETS = 2**18  # of pairs of tokens; with more pairs than that, several share a bucket by a hash
_SMOOTHING = 0.02  # added to each count
_ATTEMPTS, _ROUNDS, _ROUNDS_OF_MEANS = 4, 40, 10
_FEATURES = 1024  # counts of tokens that k-means compares
_READ = 4096  # sequences at a time
_MOST = 256  # clusters; a sequence's cluster takes one byte
_PLAIN_LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Router:
    """A classifier of sequences: it chooses a cluster from the first tokens.

    Attributes:
        prefix: The number of tokens that the router reads.
        pairs: (clusters, buckets) float32, the log of how often two neighbouring tokens occur. If
            there are very many pairs of tokens, several pairs share a bucket.
        firsts: (clusters, vocab_size) float32, the log of how often a token is the first of a pair.
        biases: (clusters,) float32, added to the log-likelihood of a whole prefix.
    """

    prefix: int
    vocab_size: int
    pairs: np.ndarray
    firsts: np.ndarray
    biases: np.ndarray

    @property
    def count(self) -> int:
        """The number of clusters."""
        return len(self.biases)

    def log_likelihoods(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-likelihood, in nats, of each prefix under each cluster's model.

        Args:
            tokens: (prefixes, length) token ids. Only the first :attr:`prefix` of a row are read.

        Returns:
            (prefixes, clusters) float64.
        """
        tokens = tokens[:, : self.prefix]
        buckets, first = _buckets(tokens, self.vocab_size), tokens[:, :-1]
        columns = [self.pairs[k][buckets].sum(1) - self.firsts[k][first].sum(1) for k in range(self.count)]
        return np.stack(columns, 1).astype(np.float64)

    def scores(self, tokens: np.ndarray) -> np.ndarray:
        """Return log-likelihood plus bias of each prefix in each cluster, (prefixes, clusters).

        For prefixes shorter than :attr:`prefix`, biases shrink in proportion.
        """
        share = (min(tokens.shape[1], self.prefix) - 1) / (self.prefix - 1)
        return self.log_likelihoods(tokens) + share * self.biases

    def route(self, tokens: np.ndarray) -> np.ndarray:
        """Return the cluster with the highest score for each prefix, (prefixes,) int64."""
        return self.scores(tokens).argmax(1)

    def save(self, folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        """Write weights, tokenizer, and a JSON file with ``settings`` and the router's sizes."""
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in ("pairs", "firsts", "biases")}
        save_file(tensors, folder / WEIGHTS_FILE)
        about = {"prefix": self.prefix, "vocab_size": self.vocab_size, "tokenizer": tokenizer.spec(), **settings}
        (folder / ROUTER_FILE).write_text(json.dumps(about, indent=1) + "\n")
        tokenizer.save(folder)


def load_router(folder: str | Path) -> Router:
    """Load the router of the folder ``folder``. Raises DataError if it is missing or damaged."""
    folder = Path(folder)
    about = _read_about(folder)
    try:
        tensors = {name: tensor.numpy() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        router = Router(int(about["prefix"]), int(about["vocab_size"]), **tensors)
        sizes = (router.pairs.shape, router.firsts.shape)
        wanted = ((router.count, _bucket_count(router.vocab_size)), (router.count, router.vocab_size))
        if sizes != wanted or router.prefix < 2:
            raise ValueError(f"its tables have the shapes {sizes} instead of {wanted}")
    except Exception as error:  # safetensors has errors of its own
        raise DataError(
            f"{folder}: the router is missing or damaged ({error}); make it again with: sdp prepare --clusters K"
        ) from error
    return router


def router_hash(folder: Path) -> str:
    """Return the sha256 of a router's weights. Routers with equal hashes choose equal paths."""
    return sha256_of(folder / WEIGHTS_FILE)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / ROUTER_FILE
    again = "make it again with: sdp prepare --clusters K"
    about = read_index(path, "no router here; make it with: sdp prepare --output DIR --clusters K", again)
    if not isinstance(about, dict):
        raise DataError(f"{path}: not the description of a router; {again}")
    return about


def check_request(count: int, prefix: int, sequence_length: int) -> None:
    """Raise DataError if the number of clusters or the prefix is out of range."""
    if not 2 <= count <= _MOST:
        raise DataError(f"the number of clusters must be from 2 to {_MOST}, but is {count}")
    if not 2 <= prefix <= sequence_length:
        raise DataError(f"the router's prefix must be from 2 to the sequence length {sequence_length}, but is {prefix}")


def make_clusters(
    directory: str | Path, count: int, prefix: int, sequence_length: int, seed: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Train a router on a prepared corpus, and assign every sequence of the corpus to a cluster.

    Router and clusters are written to the folder ``clusters`` of the corpus, and replace earlier
    ones. Equal arguments give equal clusters.

    Args:
        directory: The prepared corpus.
        count: The number of clusters.
        prefix: The number of tokens of a sequence that the router reads.
        sequence_length: Tokens in a sequence: ``data.sequence_length`` of the later training.
        seed: The seed for the choice of the sample and of the first clusters.
        progress: Whether to show progress.

    Returns:
        The figures that ``sdp prepare`` prints. Losses are of held-out prefixes, in nats per token.

        - ``sizes``: for each split, the number of sequences in each cluster
        - ``losses``: for each cluster, the loss of its model on its prefixes
        - ``loss``: the mean loss of all prefixes, each under the model of its cluster
        - ``loss_of_one``: the mean loss of all prefixes under a single model, for comparison
        - ``tokens``: for each cluster, texts of the tokens that are most typical of it

    Raises:
        DataError: An argument is out of range, or the corpus is missing, damaged or too small.
    """
    directory = Path(directory)
    check_request(count, prefix, sequence_length)
    sets = {split: TokenDataset(directory, split, sequence_length) for split in SPLITS}
    samples = len(sets["train"])
    if samples < 8 * count:
        raise DataError(
            f"{directory}: {samples} sequences of {sequence_length} tokens are too few for {count} clusters, which "
            f"need {8 * count}; give more text or a shorter --sequence-length"
        )
    random = np.random.Generator(np.random.PCG64([seed, count]))
    chosen = np.sort(random.permutation(samples)[:SAMPLE])
    prefixes = np.stack([sets["train"].read_prefix(int(item), prefix) for item in chosen])
    router = train_router(prefixes, sets["train"].vocab_size, count, random, progress)
    one = _fit(prefixes, np.zeros(len(prefixes), dtype=np.int64), sets["train"].vocab_size, 1)
    dealt: dict[str, np.ndarray] = {}
    losses, losses_of_one, counts = np.zeros(count), 0.0, np.zeros((count, sets["train"].vocab_size))
    for split, dataset in sets.items():
        clusters = np.empty(len(dataset), dtype=np.uint8)
        for start, tokens in _prefixes(dataset, prefix, f"dealing {split}", progress):
            scores = router.log_likelihoods(tokens)
            best = (scores + router.biases).argmax(1)
            clusters[start : start + len(tokens)] = best
            if split == "held_out":
                np.add.at(losses, best, -scores[np.arange(len(best)), best] / (prefix - 1))
                losses_of_one -= one.log_likelihoods(tokens).sum() / (prefix - 1)
            else:
                for k in range(count):
                    counts[k] += np.bincount(tokens[best == k].ravel(), minlength=counts.shape[1])
        dealt[split] = clusters
    tokenizer = load_tokenizer(directory)
    _write(directory, router, tokenizer, dealt, {"sequence_length": sequence_length, "seed": seed}, sets["train"])
    sizes = {split: np.bincount(clusters, minlength=count) for split, clusters in dealt.items()}
    return {
        "sizes": {split: size.tolist() for split, size in sizes.items()},
        "losses": (losses / np.maximum(sizes["held_out"], 1)).tolist(),
        "loss": float(losses.sum() / len(sets["held_out"])),
        "loss_of_one": float(losses_of_one / len(sets["held_out"])),
        "tokens": _typical(counts, tokenizer),
    }


def train_router(
    prefixes: np.ndarray, vocab_size: int, count: int, random: np.random.Generator, progress: bool = False
) -> Router:
    """Train a router on ``prefixes`` (sequences, tokens), with clusters of about equal size."""
    attempts = tqdm(range(_ATTEMPTS), "router", disable=not progress or not sys.stderr.isatty())
    return max((_attempt(prefixes, vocab_size, count, random) for _ in attempts), key=lambda found: found[0])[1]


def _attempt(prefixes: np.ndarray, vocab_size: int, count: int, random: np.random.Generator) -> tuple[float, Router]:
    """Return the log-likelihood of the sample under a router, and the router."""
    dealt, rounds = _start(prefixes, vocab_size, count, random), 0
    while True:
        router = _fit(prefixes, dealt, vocab_size, count)
        scores = router.log_likelihoods(prefixes)
        biases = balancing_biases(scores)
        before, dealt, rounds = dealt, (scores + biases).argmax(1), rounds + 1
        if (dealt != before).mean() < 0.001 or rounds > _ROUNDS:
            likelihood = scores[np.arange(len(dealt)), dealt].sum()
            return float(likelihood), replace(router, biases=biases.astype(np.float32))


def _start(prefixes: np.ndarray, vocab_size: int, count: int, random: np.random.Generator) -> np.ndarray:
    """Assign prefixes to first clusters, by spherical k-means on roots of counts of tokens."""
    points = np.zeros((len(prefixes), min(vocab_size, _FEATURES)), np.float32)
    np.add.at(points, (np.arange(len(prefixes))[:, None], prefixes * 40503 % points.shape[1]), 1)  # a hash
    points = np.sqrt(points)
    points = _on_sphere(points - points.mean(0))
    means = points[[random.integers(len(points))]]
    while len(means) < count:  # far from the means so far, as in k-means++
        distances = np.maximum(1 - (points @ means.T).max(1), 1e-9) ** 2
        means = np.concatenate([means, points[[random.choice(len(points), p=distances / distances.sum())]]])
    dealt = np.zeros(len(points), dtype=np.int64)
    for _ in range(_ROUNDS_OF_MEANS):
        likeness = points @ means.T
        dealt = (likeness + balancing_biases(likeness)).argmax(1)
        means = _on_sphere(np.stack([points[dealt == k].sum(0) for k in range(count)]))
    return dealt


def _on_sphere(points: np.ndarray) -> np.ndarray:
    return points / (np.linalg.norm(points, axis=1, keepdims=True) + 1e-9)


def balancing_biases(scores: np.ndarray) -> np.ndarray:
    """Return biases (clusters,) that make the clusters about equally large.

    A row of ``scores`` (rows, clusters) goes to the cluster with the largest sum of score and bias.
    """
    rows, count = scores.shape
    biases = np.zeros(count)
    step = float(np.abs(scores - scores.mean(1, keepdims=True)).mean()) + 1e-9
    best, least = biases, np.inf
    for _ in range(300):
        excess = np.bincount((scores + biases).argmax(1), minlength=count) / rows * count - 1
        unevenness = float(np.abs(excess).max())
        if unevenness < least:
            best, least = biases, unevenness
        if unevenness <= max(0.01, 1.5 * count / rows):
            break
        biases = biases - step * np.clip(excess, -1, 1)
        step *= 0.97
    return best - best.mean()


def _bucket_count(vocab_size: int) -> int:
    return min(vocab_size**2, _BUCKETS)


def _buckets(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the bucket of each pair of neighbours, of shape (prefixes, tokens − 1)."""
    pairs = tokens[:, :-1].astype(np.int64) * vocab_size + tokens[:, 1:]
    if vocab_size**2 <= _BUCKETS:
        return pairs
    return ((pairs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(46)).astype(np.int64)  # 18 bits


def _fit(prefixes: np.ndarray, dealt: np.ndarray, vocab_size: int, count: int) -> Router:
    """Return bigram models of clusters without biases. ``dealt`` has each prefix's cluster."""
    size = _bucket_count(vocab_size)
    pairs, firsts = np.empty((count, size), np.float32), np.empty((count, vocab_size), np.float32)
    buckets, first = _buckets(prefixes, vocab_size), prefixes[:, :-1]
    for k in range(count):
        mine = dealt == k
        pairs[k] = np.log(np.bincount(buckets[mine].ravel(), minlength=size) + _SMOOTHING)
        firsts[k] = np.log(np.bincount(first[mine].ravel(), minlength=vocab_size) + _SMOOTHING * vocab_size)
    return Router(prefixes.shape[1], vocab_size, pairs, firsts, np.zeros(count, np.float32))


def _prefixes(dataset: TokenDataset, prefix: int, what: str, progress: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Yield blocks of sequences: the index of the first sequence, and the prefixes of all."""
    last = time.monotonic()
    with tqdm(total=len(dataset), desc=what, disable=not progress or not sys.stderr.isatty()) as bar:
        for start in range(0, len(dataset), _READ):
            items = range(start, min(start + _READ, len(dataset)))
            yield start, np.stack([dataset.read_prefix(item, prefix) for item in items])
            bar.update(len(items))
            if progress and bar.disable and time.monotonic() - last >= _PLAIN_LINE_SECONDS:
                last = time.monotonic()
                print(f"{what}: {items.stop:,} of {len(dataset):,} sequences", file=sys.stderr, flush=True)


def _typical(counts: np.ndarray, tokenizer: Tokenizer, most: int = 6) -> list[list[str]]:
    """Return the tokens of each cluster by which it differs most from the corpus."""
    shares = (counts + 0.5) / (counts + 0.5).sum(1, keepdims=True)
    weight = shares * np.log(shares / shares.mean(0))
    return [[tokenizer.decode([int(token)]) for token in row.argsort()[::-1][:most]] for row in weight]


# -- the folder of clusters ------------------------------------------------------------------------


def _write(
    directory: Path,
    router: Router,
    tokenizer: Tokenizer,
    dealt: dict[str, np.ndarray],
    settings: dict[str, Any],
    train: TokenDataset,
) -> None:
    folder, new = directory / CLUSTERS, directory / f"{CLUSTERS}.tmp"
    with only_writer(directory), writing(directory):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        files = {}
        for split, clusters in dealt.items():
            (new / f"{split}.bin").write_bytes(clusters.tobytes())
            files[split] = {"sequences": len(clusters), "sha256": hashlib.sha256(clusters.tobytes()).hexdigest()}
        about = {**settings, "corpus": _tokens_of(train), "clusters": router.count, "splits": files}
        router.save(new, tokenizer, about)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)


def _tokens_of(dataset: TokenDataset) -> str:
    """Return the hash of a corpus's tokens. It depends on the texts and on the tokenizer."""
    shards = [shard.sha256 for split in dataset.index.splits.values() for shard in split.shards]
    return hashlib.sha256("".join(shards).encode()).hexdigest()


def read_clusters(dataset: TokenDataset, folder: Path | None = None) -> np.ndarray:
    """Return the cluster of each sequence of ``dataset``, (sequences,) uint8.

    Args:
        dataset: A split of a prepared corpus.
        folder: The folder of clusters, by default the folder ``clusters`` of the corpus.

    Raises:
        DataError: The clusters are missing, damaged, or for another corpus or sequence length.
    """
    folder = folder or dataset.directory / CLUSTERS
    again = f"make them again with: sdp prepare --output {dataset.directory} --clusters K --sequence-length L"
    about, path = _read_about(folder), folder / f"{dataset.split}.bin"
    length = about.get("sequence_length")
    if length != dataset.sequence_length:
        raise DataError(
            f"{folder}: the clusters are of sequences of {length} tokens, but data.sequence_length is "
            f"{dataset.sequence_length}; {again}"
        )
    if about.get("corpus") != _tokens_of(dataset):
        raise DataError(f"{folder}: has the clusters of another corpus; {again}")
    require_regular(path, again)
    recorded = about.get("splits", {}).get(dataset.split, {}).get("sha256")
    if not path.is_file() or sha256_of(path) != recorded:
        raise DataError(f"{path}: missing or damaged; {again}")
    clusters = np.fromfile(path, dtype=np.uint8)
    if len(clusters) != len(dataset) or clusters.max(initial=0) >= about.get("clusters", 0):
        raise DataError(f"{path}: does not have a valid cluster for each sequence of the corpus; {again}")
    return clusters
