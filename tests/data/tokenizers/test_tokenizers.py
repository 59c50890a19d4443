"""Tokenizers: lossless round trips, reproducible training, and clear errors."""

import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sdp.data import encode
from sdp.data.index import load_index
from sdp.data.prepare import prepare
from sdp.data.tokenizers import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    check_request,
    load_encoder,
    load_tokenizer,
    make_tokenizer,
    tokenizer_from_spec,
    train_sentencepiece,
)
from sdp.engine.errors import DataError
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.texts import AWKWARD, save_byte_level

TEXTS = [
    "def square(value):\n    if value > 1000:\n\t\treturn value * value\n\n\n        # done  \n",
    "class Square:\n    def __init__(self, value):\n        self.value = value  # keep\n",
] * 20


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentencepiece(TEXTS, 320)


@pytest.fixture(scope="module")
def piece(model) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory):
    return save_byte_level(tmp_path_factory.mktemp("hf"), TEXTS, eos_token="<|endoftext|>")


@settings(max_examples=200, deadline=None)
@given(st.text())
@example("a ▁ b")
def test_bytes_and_sentencepiece_lose_nothing(piece, text):
    for tokenizer in (BytesTokenizer(), piece):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text


@pytest.mark.parametrize("text", [*AWKWARD, TEXTS[0]])
def test_awkward_text(piece, hf_directory, text):
    for tokenizer in (BytesTokenizer(), piece, HuggingFaceTokenizer(str(hf_directory))):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "hf"])
def test_a_batch_has_the_ids_of_each_text(tmp_path, piece, hf_directory, kind):
    """With the whole tokenizer, and with the encoder that worker processes load."""
    tokenizer = {"bytes": BytesTokenizer(), "sentencepiece": piece, "hf": HuggingFaceTokenizer(str(hf_directory))}[kind]
    tokenizer.save(tmp_path)
    encode = load_encoder(tokenizer.spec(), tmp_path)

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.text() | st.sampled_from(["<|endoftext|>", "a ▁ b", "def f(x):\n\treturn x", "", "word " * 900]))
    )
    def check(texts: list[str]) -> None:
        expected = [tokenizer.encode(text) for text in texts]
        for batch in (tokenizer.encode_batch(texts), encode(texts)):
            assert [ids.tolist() for ids in batch] == expected
            assert all(ids.dtype == np.uint32 for ids in batch)

    check()


def test_sentencepiece_is_reproducible_and_of_the_size_asked_for(model, piece):
    assert train_sentencepiece(TEXTS, 320) == model
    assert piece.vocab_size == 320
    assert len(piece.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_saved_tokenizers_come_back(tmp_path, hf_directory):
    for request, size in (("bytes", None), ("sentencepiece", 320), (f"hf:{hf_directory}", None)):
        directory = tmp_path / request[:2]
        directory.mkdir()
        made = make_tokenizer(request, size, TEXTS)
        made.save(directory)
        (directory / "index.json").write_text(json.dumps({"tokenizer": made.spec()}))
        loaded = load_tokenizer(directory)
        assert loaded.spec() == made.spec()
        assert (loaded.vocab_size, loaded.end_of_text) == (made.vocab_size, made.end_of_text)
        assert loaded.encode(TEXTS[0]) == made.encode(TEXTS[0])


def test_foreign_sentencepiece_model_is_refused(tmp_path, model, piece):
    with pytest.raises(DataError, match=r"tokenizer\.model: cannot be read"):
        tokenizer_from_spec(piece.spec(), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.model: not the tokenizer that made these shards"):
        tokenizer_from_spec(piece.spec(), tmp_path)


@pytest.mark.parametrize("name", ["../tokenizer", "/etc", "..", "", "a/b"])
def test_a_tokenizer_outside_the_directory_is_refused(tmp_path, name):
    for spec in ({"kind": "sentencepiece", "file": name, "sha256": ""}, {"kind": "hf", "directory": name, "name": "x"}):
        with pytest.raises(DataError, match="is not in this directory"):
            tokenizer_from_spec(spec, tmp_path)


def test_unknown_kind_and_missing_index(tmp_path):
    with pytest.raises(DataError, match=r"known kind of tokenizer: \{'kind': 'pickle'\}"):
        tokenizer_from_spec({"kind": "pickle"}, tmp_path)
    with pytest.raises(DataError, match="run sdp prepare first"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("request_", "size", "message"),
    [
        ("sentencpiece", None, "unknown tokenizer 'sentencpiece': choose sentencepiece, bytes or hf:NAME"),
        ("hf:", None, "hf: must be followed by"),
        ("bytes", 256, "the bytes tokenizer has 257 tokens, not 256"),
        ("hf:gpt2", 50257, "the vocabulary of 'hf:gpt2' is fixed"),
    ],
)
def test_bad_requests(request_, size, message):
    with pytest.raises(DataError, match=message):
        check_request(request_, size)


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (TEXTS, 100_000,
            r"too small for a SentencePiece vocabulary of 100,000: it has only \d+ tokens; use --vocab-size \d+"),
        (TEXTS, 100, r"a SentencePiece vocabulary of 100 is too small: this corpus needs more than \d+ tokens"),
        ([], 300, "the corpus is empty"),
    ],
)  # fmt: skip
def test_training_errors_say_what_to_do(texts, size, message):
    with pytest.raises(DataError, match=message):
        train_sentencepiece(texts, size)


def test_missing_transformers_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"needs the transformers package: pip install 'sdp-engine\[huggingface\]'"):
        HuggingFaceTokenizer("gpt2")


def test_code_in_a_tokenizers_folder_is_not_run_and_not_asked_about(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "custom.py").write_text("raise SystemExit('this code ran')\n")
    auto = {"AutoTokenizer": ["custom.Custom", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Custom", "auto_map": auto}))
    (tmp_path / "script.py").write_text(
        "import io, sys; sys.stdin = io.StringIO('y\\n')\n"
        f"from sdp.data.tokenizers import HuggingFaceTokenizer; HuggingFaceTokenizer({str(tmp_path)!r})"
    )
    code, printed = ForkedScript(tmp_path / "script.py").end()
    assert code == 1 and "DataError" in printed
    assert "this code ran" not in printed and "[y/N]" not in printed


def test_hugging_face_tokenizer_must_exist_and_end_documents(tmp_path, hf_directory):
    with pytest.raises(DataError, match="cannot be loaded"):
        HuggingFaceTokenizer(str(tmp_path / "nothing"))
    for file in hf_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        HuggingFaceTokenizer(str(tmp_path))


def test_texts_begin_and_documents_end_with_chosen_tokens(tmp_path, hf_directory, monkeypatch):
    """Also a long text, which is cut up."""
    monkeypatch.setattr(encode, "LONG_CHARACTERS", 1000)
    source = tmp_path / "texts.jsonl"
    texts = [TEXTS[0], TEXTS[1], TEXTS[0] * 40]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    directory = save_byte_level(tmp_path / "hf", TEXTS, eos_token="<|endoftext|>", bos_token="<s>", pad_token="<doc>")
    prepare(
        [str(source)], tmp_path / "out", f"hf:{directory}", workers=1, progress=False, held_out=0.3, bos=True,
        separator="<doc>",
    )  # fmt: skip
    tokenizer, index = load_tokenizer(tmp_path / "out"), load_index(tmp_path / "out")
    plain = HuggingFaceTokenizer(str(directory))
    begin, end = plain.begin_of_text, HuggingFaceTokenizer(str(directory), separator="<doc>").end_of_text
    assert (index.end_of_text, tokenizer.end_of_text) == (end, end) and end not in (plain.end_of_text, begin)
    found = []
    for split in index.splits.values():
        tokens = np.concatenate([np.fromfile(tmp_path / "out" / shard.file, index.dtype) for shard in split.shards])
        documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
        assert split.documents == len(documents)
        assert all(document[0] == begin and begin not in document[1:] for document in documents)
        found += [tokenizer.decode(document[1:].tolist()) for document in documents]
    assert sorted(found) == sorted(texts)
    with pytest.raises(DataError, match="has no token 'nothing'"):
        prepare([str(source)], tmp_path / "x", f"hf:{directory}", progress=False, separator="nothing")
    with pytest.raises(DataError, match="has no token that begins a text; leave --bos out"):
        prepare([str(source)], tmp_path / "x", f"hf:{hf_directory}", workers=1, progress=False, bos=True, held_out=0.3)
    with pytest.raises(DataError, match=r"--bos: has an effect only .* \(hf:NAME\), not with bytes"):
        prepare([str(source)], tmp_path / "x", "bytes", progress=False, bos=True)
    assert not (tmp_path / "x").exists()
