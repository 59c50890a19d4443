"""The data of a run is verified by one rank for all."""

import logging
from pathlib import Path

import pytest
from sdp.data.prepare import prepare
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, DataError, SDPError
from sdp.tools.runs import dataset as room
from sdp.tools.runs.dataset import open_corpus


@pytest.fixture
def shards(tmp_path) -> Path:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 9)
    prepare([str(tmp_path / "*.txt")], tmp_path / "shards", tokenizer="bytes", held_out=0.3, workers=1, progress=False)
    return tmp_path / "shards"


def flip_a_token(shards: Path) -> None:
    """Another token of the vocabulary: nothing but the hash tells."""
    path = shards / "train-00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def config(path: Path, **data):
    return load_config({"train_batch_size": 4, "data": {"path": str(path), "sequence_length": 8, **data}})


def error_of(path: str, other_path: str) -> tuple[str, str]:
    import torch.distributed as dist

    try:
        open_corpus(config(Path(path if dist.get_rank() == 0 else other_path)), Path(path))
    except SDPError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_flipped_token_is_found_when_the_run_starts(shards, tmp_path):
    open_corpus(config(shards), tmp_path)
    flip_a_token(shards)
    with pytest.raises(DataError, match=r"train-00000\.bin: sha256 .* damaged; prepare it again with"):
        open_corpus(config(shards), tmp_path)


def test_a_huge_corpus_is_announced_instead(shards, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(room, "VERIFIED_BYTES", 10)
    monkeypatch.setattr(logging.getLogger("sdp"), "propagate", True)
    flip_a_token(shards)
    with caplog.at_level(logging.INFO, "sdp"):
        open_corpus(config(shards), tmp_path)
        assert [record.message for record in caplog.records] == [
            f"data: the 0.0 GB in {shards} are not hashed at each start; to check them now: "
            f"sdp prepare --output {shards} --verify"
        ]


def test_what_one_rank_finds_is_raised_on_all(shards, ranks):
    sound = ranks.run(error_of, str(shards), str(shards), world=2)
    assert sound == [("", "")] * 2
    missing = ranks.run(error_of, str(shards), str(shards / "nowhere"), world=2)
    assert missing[0] == missing[1]
    assert missing[0][0] == "DataError"
    assert "nowhere: no prepared data here" in missing[0][1]
    flip_a_token(shards)
    damaged = ranks.run(error_of, str(shards), str(shards), world=2)
    assert damaged[0] == damaged[1]
    assert "train-00000.bin: sha256" in damaged[0][1]


def test_the_tokenizer_that_is_asked_for_must_be_the_one_of_the_shards(shards, tmp_path):
    open_corpus(config(shards, tokenizer="bytes", vocab_size=257), tmp_path)
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: hf:gpt2, but .* was prepared with bytes; remove data\.tokenizer"
    ):
        open_corpus(config(shards, tokenizer="hf:gpt2"), tmp_path)
