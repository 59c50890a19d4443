"""Clusters: the router tells two kinds of text apart, deals them evenly, and is read back whole."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from sdp.data.clusters import CLUSTERS, load_router, make_clusters, read_clusters, train_router
from sdp.data.prepare import prepare
from sdp.data.shards import TokenDataset
from sdp.engine.errors import DataError
from sdp.tools.cli import main

LENGTH, PREFIX = 32, 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus: half of it is sums of numbers, half is words."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(60):
            numbers = " ".join(f"{a}+{b}={a + b};" for a, b in random.integers(0, 1000, (40, 2)))
            words = " ".join(random.choice(["the", "cat", "sat", "under", "green", "trees"], 80))
            file.writelines(json.dumps({"text": text}) + "\n" for text in (numbers, words))
    prepare([str(folder / "texts.jsonl")], folder / "data", "bytes", held_out=0.2, progress=False)
    make_clusters(folder / "data", 2, PREFIX, LENGTH, progress=False)
    return folder / "data"


def kinds(dataset: TokenDataset) -> np.ndarray:
    """Whether each sequence's prefix is mostly digits and signs."""
    return np.array(
        [np.mean(dataset.read_prefix(item, PREFIX) < ord("A")) > 0.6 for item in range(len(dataset))], dtype=int
    )


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_each_kind_of_text_has_a_cluster(corpus: Path, split: str) -> None:
    dataset = TokenDataset(corpus, split, LENGTH)
    clusters = read_clusters(dataset)
    agreement = np.mean(clusters == kinds(dataset))
    assert max(agreement, 1 - agreement) > 0.9  # the two kinds are not equally frequent, and clusters are
    tokens = np.stack([dataset.read_prefix(item, PREFIX) for item in range(len(dataset))])
    np.testing.assert_array_equal(load_router(corpus / CLUSTERS).route(tokens), clusters)


def test_clusters_of_one_kind_are_equally_large() -> None:
    prefixes = np.random.default_rng(1).zipf(1.5, (3000, 12)) % 50  # nothing to tell apart
    random = np.random.default_rng(2)
    router = train_router(prefixes, 50, 3, random)
    sizes = np.bincount(router.route(prefixes), minlength=3)
    assert sizes.min() > 0.95 * 1000 and sizes.max() < 1.05 * 1000


def test_likelihoods_are_those_of_counted_pairs() -> None:
    prefixes = np.random.default_rng(3).integers(0, 5, (64, 6))
    router = train_router(prefixes, 5, 2, np.random.default_rng(4))
    dealt = router.route(prefixes)
    counts = np.zeros((2, 5, 5))
    for row, cluster in zip(prefixes, dealt, strict=True):
        for first, second in itertools.pairwise(row):
            counts[cluster, first, second] += 1
    model = np.log((counts + 0.02) / (counts + 0.02).sum(2, keepdims=True))
    wanted = [[sum(model[k, a, b] for a, b in itertools.pairwise(row)) for k in (0, 1)] for row in prefixes]
    np.testing.assert_allclose(router.log_likelihoods(prefixes), wanted, rtol=1e-4)


def test_equal_arguments_give_equal_files(corpus: Path) -> None:
    before = {path.name: path.read_bytes() for path in (corpus / CLUSTERS).iterdir()}
    make_clusters(corpus, 2, PREFIX, LENGTH, progress=False)
    assert {path.name: path.read_bytes() for path in (corpus / CLUSTERS).iterdir()} == before


def test_the_command_prints_the_clusters(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clusters", "2", "--router-prefix", str(PREFIX), "--sequence-length", str(LENGTH)]
    assert main(["prepare", "--output", str(corpus), *options]) == 0
    out = capsys.readouterr().out
    train, held_out = (len(TokenDataset(corpus, split, LENGTH)) for split in ("train", "held_out"))
    rows = [line.split()[:3] for line in out.splitlines()[1:3]]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [sum(int(row[column].replace(",", "")) for row in rows) for column in (1, 2)] == [train, held_out]
    assert "less than one model for all" in out


def test_a_request_is_refused_before_the_corpus_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clusters", "2", "--sequence-length", "64"]  # shorter than the default prefix
    assert main(["prepare", "--output", str(tmp_path / "new"), *options]) == 2
    assert "prefix must be from 2 to the sequence length 64, but is 128" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, PREFIX, LENGTH), "number of clusters must be from 2 to 256, but is 1"),
        ((2, LENGTH + 1, LENGTH), "prefix must be from 2 to the sequence length 32, but is 33"),
        ((200, PREFIX, 4096), "too few for 200 clusters"),
    ],
)
def test_arguments_that_do_not_fit(corpus: Path, arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_clusters(corpus, *arguments, progress=False)


def test_other_or_damaged_clusters_are_one_line(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the clusters are of sequences of 32 tokens, but data\.sequence_length is 16"):
        read_clusters(TokenDataset(corpus, "train", 16))
    dataset = TokenDataset(corpus, "train", LENGTH)
    with pytest.raises(DataError, match="no router here"):
        read_clusters(dataset, tmp_path)
    about = json.loads((corpus / CLUSTERS / "router.json").read_text())
    (tmp_path / "router.json").write_text(json.dumps(about))
    (tmp_path / "train.bin").write_bytes(bytes(len(dataset)))
    with pytest.raises(DataError, match=r"train\.bin: missing or damaged"):
        read_clusters(dataset, tmp_path)
    (tmp_path / "router.json").write_text(json.dumps(about | {"corpus": "0"}))
    with pytest.raises(DataError, match="the clusters of another corpus"):
        read_clusters(dataset, tmp_path)
    with pytest.raises(DataError, match="the router is missing or damaged"):
        load_router(tmp_path)


def test_clusters_of_the_same_texts_in_other_tokens_are_refused(corpus: Path, tmp_path: Path) -> None:
    texts, other = str(corpus.parent / "texts.jsonl"), tmp_path / "other"
    prepare([texts], other, "bytes", held_out=0.3, progress=False)
    with pytest.raises(DataError, match="the clusters of another corpus"):
        read_clusters(TokenDataset(other, "train", LENGTH), corpus / CLUSTERS)
