"""Writes this project's tokenizers as files that ``transformers`` loads.

The loaded tokenizer gives the same ids for the same text, and has the same end-of-text token. The
files are JSON in the format of the package ``tokenizers``, which need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..engine.errors import DataError
from .tokenizers import (
    END_OF_TEXT,
    SPACE_SYMBOL,
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_UNLIMITED = int(1e30)  # transformers writes this number if texts may have any length
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TEXT,
    "model_max_length": _UNLIMITED,
    "clean_up_tokenization_spaces": False,
}

# Our SentencePiece models are trained without a space before the text, and no token begins a text.
_SENTENCEPIECE_CONFIG = {"add_prefix_space": False, "legacy": False, "add_bos_token": False, "add_eos_token": False}


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> tuple[int | None, int]:
    """Write the files that ``AutoTokenizer.from_pretrained(directory)`` reads.

    Returns two ids: that of the BOS token, or None without such a token, and that of the token that
    ends a document. Raises DataError if the class of ``tokenizer`` has no counterpart in
    ``transformers``.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.save_pretrained(directory), tokenizer.end_of_text
    if isinstance(tokenizer, SentencePieceTokenizer):
        pieces = list(tokenizer.pieces())
        vocabulary = {piece.text: number for number, piece in enumerate(pieces)}
        scores = {piece.text: piece.score for piece in pieces if piece.mergeable}
        model = _byte_fallback_bpe(vocabulary, list(_merges(scores, vocabulary)))
        # llama.cpp's converter reads pieces, scores and types from this file.
        tokenizer.save(directory)
    elif isinstance(tokenizer, BytesTokenizer):
        model = _byte_fallback_bpe(
            {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_TEXT: tokenizer.end_of_text}, []
        )
    else:
        raise DataError(f"{type(tokenizer).__name__} has no counterpart in transformers")
    # If the corpus of a SentencePiece model has no spaces, the model spells a space as the bytes of
    # its symbol.
    spaces_are_tokens = not isinstance(tokenizer, SentencePieceTokenizer) or " " in model["vocab"]
    _write(
        directory / "tokenizer.json", _tokenizer_json(model, tokenizer.end_of_text, spaces_are_tokens=spaces_are_tokens)
    )
    of_sentencepiece = _SENTENCEPIECE_CONFIG if isinstance(tokenizer, SentencePieceTokenizer) else {}
    _write(directory / "tokenizer_config.json", _TOKENIZER_CONFIG | of_sentencepiece)
    return None, tokenizer.end_of_text


def _merges(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """List every way to divide each piece into two pieces, with the best pieces first.

    SentencePiece merges the two neighbours that make the best piece. It does not matter where the
    piece is divided.
    """
    for piece in sorted(scores, key=lambda text: (-scores[text], vocabulary[text])):
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]


def _byte_fallback_bpe(vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """A BPE model that spells characters without a token by their bytes, such as ``<0xE2>``."""
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": True, "ignore_merges": False, "vocab": dict(vocabulary), "merges": merges,
    }  # fmt: skip


def _tokenizer_json(model: Mapping[str, Any], end_of_text: int, *, spaces_are_tokens: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end_of_text, "content": END_OF_TEXT, **flags}],
        "normalizer": None
        if spaces_are_tokens
        else {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SYMBOL},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": model,
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
