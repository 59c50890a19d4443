"""The exported tokenizer in the reader of llama.cpp's converter: its package ``gguf``."""

from pathlib import Path

import pytest
import sentencepiece
from sdp.data.huggingface import write_tokenizer
from sdp.data.tokenizers import END_OF_TEXT, SentencePieceTokenizer, train_sentencepiece

vocabularies = pytest.importorskip("gguf.vocab", reason="gguf is not installed; the extra 'dev' has it")
TEXTS = ["the cat sat on the mat, and the dog sat on the log " * 20, "naïve café: 12 + 34 = 46\n" * 20]


def test_pieces_scores_and_types_are_those_of_the_trained_tokenizer(tmp_path: Path) -> None:
    trained = train_sentencepiece(TEXTS, 300)
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
