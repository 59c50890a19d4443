"""Tokenizers written for ``transformers``: the same ids for any text, whatever the corpus was."""

import copy
import json
import random
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sdp.data.huggingface import write_tokenizer
from sdp.data.tokenizers import END_OF_TEXT, BytesTokenizer, SentencePieceTokenizer, train_sentencepiece

transformers = pytest.importorskip("transformers")
WORDS = random.Random(0)
CORPORA = {
    # Few letters make long pieces that overlap in many ways.
    "two letters": (["".join(WORDS.choice("ab ") for _ in range(60)) for _ in range(500)], 330),
    "code": (["def square(value):\n    if value > 1000:\n\t\treturn value * value\n\n\n        # done  \n"] * 40, 320),
    "no spaces": (["你好世界，今天天气很好。\n", "世界很大。\n"] * 40, 290),
    "bytes": ([], 257),
}


@pytest.fixture(scope="module", params=CORPORA)
def pair(request, tmp_path_factory):
    """Our tokenizer, and the one that transformers loads from our files."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts, size = CORPORA[request.param]
    ours = SentencePieceTokenizer(train_sentencepiece(texts, size)) if texts else BytesTokenizer()
    assert write_tokenizer(ours, folder) == (None, ours.end_of_text)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return ours, transformers.AutoTokenizer.from_pretrained(folder), texts


AWKWARD = st.text(alphabet="ab \n\t▁é漢世界好。0<>|x", max_size=40)


def test_ids_and_text_are_the_same(pair):
    ours, theirs, texts = pair
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.end_of_text

    @settings(max_examples=300, deadline=None)
    @given(
        AWKWARD | st.text() | st.sampled_from([*texts[:50], "<|endoftext|>", "<unk> <0x41>", "\n" * 9, "  \n  \t  "])
    )
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert theirs(text, split_special_tokens=True)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)

    check()


def test_an_added_special_token_is_one_token(pair):
    ours, theirs, _ = pair
    theirs = copy.deepcopy(theirs)
    theirs.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert theirs("<|user|>")["input_ids"] == [ours.vocab_size]


def test_end_of_text_is_decoded_and_skipped_on_demand(pair):
    ours, theirs, _ = pair
    ids = [*ours.encode("ab"), ours.end_of_text]
    assert theirs.decode(ids, skip_special_tokens=True) == "ab"
    assert theirs.decode(ids) == "ab<|endoftext|>"


def test_llama_cpp_reads_pieces_and_scores(tmp_path):
    """The converter ``convert_hf_to_gguf.py`` reads ``tokenizer.model``.

    Its fallback gives all pieces the score -1000.
    """
    texts, size = CORPORA["code"]
    ours = SentencePieceTokenizer(train_sentencepiece(texts, size))
    write_tokenizer(ours, tmp_path)
    found = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())

    assert found.vocab_size() == ours.vocab_size
    for number, piece in enumerate(ours.pieces()):
        assert found.id_to_piece(number).replace("▁", " ") == piece.text
        assert found.get_score(number) == piece.score
    merged = [number for number in range(size) if len(found.id_to_piece(number)) > 1 and not found.is_byte(number)]
    assert len({found.get_score(number) for number in merged}) > 10, "the scores give the order of the merges"
    assert not any(" " in found.id_to_piece(number) for number in range(size)), "spaces have SentencePiece's symbol"
    assert found.encode("def f") == ours.encode("def f"), "no space is added before the text"
    keys = ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token")
    assert [settings[key] for key in keys] == [False] * 4


def test_llama_cpps_converter_reads_pieces_scores_and_types(tmp_path: Path) -> None:
    """In its package ``gguf``."""
    vocabularies = pytest.importorskip("gguf.vocab", reason="gguf is not installed; the extra 'dev' has it")
    texts = ["the cat sat on the mat, and the dog sat on the log " * 20, "naïve café: 12 + 34 = 46\n" * 20]
    trained = train_sentencepiece(texts, 300)
    write_tokenizer(SentencePieceTokenizer(trained), tmp_path)
    read = vocabularies.SentencePieceVocab(tmp_path)
    expected = sentencepiece.SentencePieceProcessor(model_proto=trained)
    pieces = list(read.all_tokens())
    assert len(pieces) == expected.vocab_size()
    assert [piece.decode() for piece, _, _ in pieces] == [expected.id_to_piece(i) for i in range(len(pieces))]
    assert [score for _, score, _ in pieces] == [expected.get_score(i) for i in range(len(pieces))]
    words = [(piece.decode(), score) for piece, score, kind in pieces if kind.name == "NORMAL"]
    assert len({score for _, score in words}) > 10, "a merge without its own score cannot be chosen"
    assert not any(" " in piece for piece, _ in words)  # spaces are written as sentencepiece does
    assert any(piece.startswith("\u2581") for piece, _ in words)
    assert sum(kind.name == "BYTE" for _, _, kind in pieces) == 256
    special = vocabularies.SpecialVocab(tmp_path, n_vocab=len(pieces))
    assert special.add_special_token == {"bos": False, "eos": False}
    assert END_OF_TEXT in {piece.decode() for piece, _, _ in pieces}
