"""Shards: what is written is what is read, across shard boundaries; damage is found and named."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sdp.data import shards
from sdp.data.index import Corpus, Index, load_index
from sdp.data.prepare import ShardWriter
from sdp.data.shards import TokenDataset
from sdp.data.tokenizers import load_tokenizer
from sdp.engine.errors import DataError
from sdp.tests.support.forks.server import fork_context
from torch.utils.data import DataLoader

END = 256


def write(directory, tokens, shard_tokens=10, vocab_size=257, dtype="uint16", split="train") -> Index:
    """A prepared directory with ``tokens`` in one split, written in uneven parts."""
    writer = ShardWriter(directory, split, np.dtype(dtype).newbyteorder("<"), shard_tokens, END)
    for part in np.split(np.asarray(tokens), [3, 4, 17]):
        writer.write(part)
    index = Index(
        tokenizer={"kind": "bytes"},
        vocab_size=vocab_size,
        end_of_text=END,
        dtype=dtype,  # pyright: ignore[reportArgumentType]  # pydantic checks it
        splits={split: writer.finish()},
        corpus=Corpus(sources=["made"], sha256="", files=1, bytes=1, documents=1, text_bytes=1),
        settings={},
    )
    index.save(directory)
    return index


@pytest.fixture
def tokens() -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 256, 37)
    tokens[[4, 9, 36]] = END
    return tokens


def test_shards_are_bounded_raw_little_endian_files(tmp_path, tokens):
    index = write(tmp_path, tokens)
    made = index.splits["train"].shards
    assert [shard.tokens for shard in made] == [10, 10, 10, 7]
    assert [shard.documents for shard in made] == [2, 0, 0, 1]
    assert [shard.file for shard in made] == [f"train-0000{i}.bin" for i in range(4)]
    raw = b"".join((tmp_path / shard.file).read_bytes() for shard in made)
    assert raw == tokens.astype("<u2").tobytes()
    assert not list(tmp_path.glob("*.tmp"))
    assert load_index(tmp_path) == index


@pytest.mark.parametrize("length", [1, 4, 10, 23, 37])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (70_000, "uint32")])
def test_samples_span_shards(tmp_path, tokens, length, vocab_size, dtype):
    write(tmp_path, tokens, vocab_size=vocab_size, dtype=dtype)
    dataset = TokenDataset(tmp_path, "train", length)
    assert len(dataset) == 37 // length
    for i in range(len(dataset)):
        sample = dataset[i]
        expected = torch.from_numpy(tokens[i * length : (i + 1) * length])
        assert sample["input_ids"].dtype == torch.int64
        assert torch.equal(sample["input_ids"], expected)
        assert torch.equal(sample["labels"], expected)
        assert sample["labels"].data_ptr() != sample["input_ids"].data_ptr()
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    dataset.verify()


def test_workers_that_unpickle_the_data_read_the_same(tmp_path, tokens):
    write(tmp_path, tokens)
    dataset = TokenDataset(tmp_path, "train", 4)
    first = dataset[0]["input_ids"]
    assert len(pickle.dumps(dataset)) < 5_000
    loader = DataLoader(dataset, batch_size=3, num_workers=1, multiprocessing_context=fork_context())
    batches = list(loader)
    assert torch.equal(batches[0]["input_ids"][0], first)
    assert [tuple(batch["labels"].shape) for batch in batches] == [(3, 4)] * 3


def test_token_outside_the_vocabulary_is_a_data_error(tmp_path, tokens):
    index = write(tmp_path, tokens)
    path = tmp_path / index.splits["train"].shards[1].file
    values = np.fromfile(path, dtype="<u2")
    values[5] = 999
    values.tofile(path)
    dataset = TokenDataset(tmp_path, "train", 4)
    dataset[0]
    with pytest.raises(DataError, match=r"train-00001\.bin: damaged: token id 999 .* vocabulary of 257"):
        dataset[3]
    with pytest.raises(DataError, match=r"train-00001\.bin: sha256 .* damaged; prepare it again"):
        dataset.verify()


def test_missing_and_cut_off_shards_are_named_when_opening(tmp_path, tokens):
    index = write(tmp_path, tokens)
    path = tmp_path / index.splits["train"].shards[2].file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        DataError, match=r"train-00002\.bin: 17 bytes instead of 20, damaged .* prepare it again with: sdp"
    ):
        TokenDataset(tmp_path, "train", 4)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00002\.bin: this token shard is missing"):
        TokenDataset(tmp_path, "train", 4)


def test_a_shard_that_is_cut_off_after_opening_is_named_when_it_is_first_read(tmp_path, tokens):
    index = write(tmp_path, tokens)
    dataset = TokenDataset(tmp_path, "train", 4)
    path = tmp_path / index.splits["train"].shards[2].file
    path.write_bytes(path.read_bytes()[:-4])
    assert dataset[0]["input_ids"].tolist() == tokens[:4].tolist()
    with pytest.raises(DataError, match=r"train-00002\.bin: 16 bytes instead of 20, damaged or cut off"):
        dataset[5]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_more_shards_than_a_process_may_have_open(tmp_path, tokens, monkeypatch):
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    write(tmp_path, tokens)
    dataset = TokenDataset(tmp_path, "train", 4)
    before = open_files()
    for item in (*range(9), 0):
        assert dataset[item]["input_ids"].tolist() == tokens[4 * item : 4 * item + 4].tolist()
    assert open_files() == before + 2
    del dataset
    assert open_files() == before


@pytest.mark.parametrize("name", ["index.json", "train-00000.bin"])
def test_a_fifo_among_prepared_data_is_refused_without_a_hang(tmp_path, tokens, name):
    write(tmp_path, tokens)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: .* a FIFO; "):
        TokenDataset(tmp_path, "train", 4)
    if name == "index.json":
        with pytest.raises(DataError, match="a FIFO"):
            load_tokenizer(tmp_path)


def test_bad_requests(tmp_path, tokens):
    write(tmp_path, tokens)
    with pytest.raises(DataError, match="has no split 'held_out'; there are train"):
        TokenDataset(tmp_path, "held_out", 4)
    with pytest.raises(DataError, match="37 tokens, fewer than one sequence of 38"):
        TokenDataset(tmp_path, "train", 38)
    with pytest.raises(DataError, match="at least 1, but is 0"):
        TokenDataset(tmp_path, "train", 0)
    with pytest.raises(DataError, match=r"no prepared data here .* make it with: sdp prepare --input FILES --output"):
        TokenDataset(tmp_path / "nothing", "train", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format="other"), "not an index of token shards"),
        (lambda index: index.update(version=2), "version 2, but this program reads version 1"),
        (lambda index: index.update(extra=1), "extra: "),
        (lambda index: index.pop("dtype"), "dtype: Field required"),
        (lambda index: index.update(end_of_text=257), "end_of_text .* outside the vocabulary"),
        (lambda index: index["splits"]["train"].update(tokens=36), "another number of tokens than the split"),
        (lambda index: index["splits"]["train"]["shards"][0].update(file="../x.bin"), r"shards\.0\.file"),
    ],
)
def test_unsound_index_is_refused(tmp_path, tokens, change, message):
    write(tmp_path, tokens)
    content = json.loads((tmp_path / "index.json").read_text())
    change(content)
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as caught:
        load_index(tmp_path)
    assert "\n" not in str(caught.value)


def test_index_that_is_no_json(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index\.json: cannot be read as JSON"):
        load_index(tmp_path)


def test_the_documents_of_a_sample_are_numbered_and_end_with_their_end_of_text(tmp_path):
    write(tmp_path, [1, 2, END, 3, END, END, 4, 5, 6, 7, END, 8])
    data = TokenDataset(tmp_path, "train", 6, document_mask=True)
    assert data[0]["documents"].tolist() == [0, 0, 0, 1, 1, 2]
    assert data[1]["documents"].tolist() == [0, 0, 0, 0, 0, 1]
    assert "documents" not in TokenDataset(tmp_path, "train", 6)[0]
