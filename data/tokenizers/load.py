"""Loads the tokenizer that a request names, trains one, or loads the tokenizer of prepared data."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from ...engine.errors import DataError, quote, shorten
from ..shared.files import INDEX_FILE, read_index, require_regular
from .kinds import (
    END_OF_TEXT,
    HF_DIRECTORY,
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    encode_fast,
    load_fast,
)

DEFAULT_VOCAB_SIZE = 4096
_HF_PREFIX = "hf:"
_SMALLEST_VOCABULARY = 260  # unknown, end of text, newline, tab and the 256 bytes


def check_request(request: str, vocab_size: int | None) -> None:
    """Check the name of a tokenizer and the size of its vocabulary.

    Raises DataError unless ``request`` is ``bytes``, ``sentencepiece`` or ``hf:NAME``, and fits
    ``vocab_size``.
    """
    if request not in ("bytes", "sentencepiece") and not request.startswith(_HF_PREFIX):
        raise DataError(f"unknown tokenizer {quote(request)}: choose sentencepiece, bytes or hf:NAME")
    if request == _HF_PREFIX:
        raise DataError("hf: must be followed by a directory or a name on the hub, as in hf:gpt2")
    if request == "sentencepiece" and vocab_size is not None and vocab_size <= _SMALLEST_VOCABULARY:
        raise DataError(
            f"the vocabulary size must be more than {_SMALLEST_VOCABULARY}, since every byte is a token; it is "
            f"{vocab_size}"
        )
    if request == "bytes" and vocab_size not in (None, BytesTokenizer.vocab_size):
        raise DataError(
            f"the bytes tokenizer has {BytesTokenizer.vocab_size} tokens, not {vocab_size}: leave the size out"
        )
    if request.startswith(_HF_PREFIX) and vocab_size is not None:
        raise DataError(f"the vocabulary of {quote(request)} is fixed: leave the vocabulary size ({vocab_size}) out")


def request_of(spec: dict[str, Any]) -> str:
    """Return the request that led to a tokenizer with this ``spec()``."""
    return f"{_HF_PREFIX}{spec.get('name')}" if spec.get("kind") == "hf" else str(spec.get("kind"))


def ready_made(request: str, separator: str | None = None) -> BytesTokenizer | HuggingFaceTokenizer | None:
    """Load the tokenizer that ``request`` names, or return None if it must be trained first.

    ``separator``: the token that ends a document. Raises DataError if it cannot be loaded.
    """
    if request == "sentencepiece":
        return None
    if request == "bytes":
        return BytesTokenizer()
    return HuggingFaceTokenizer(request.removeprefix(_HF_PREFIX), separator=separator)


def make_tokenizer(request: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Load or train the tokenizer that ``request`` names.

    Only SentencePiece reads ``texts`` and learns from them. Raises DataError if the tokenizer
    cannot be loaded or trained.
    """
    check_request(request, vocab_size)
    return ready_made(request) or SentencePieceTokenizer(train_sentencepiece(texts, vocab_size or DEFAULT_VOCAB_SIZE))


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a prepared directory.

    Raises DataError if it is missing, or is not the tokenizer of the directory's shards.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    content = read_index(index, f"no {INDEX_FILE}; run sdp prepare first", "prepare the data again")
    if not isinstance(content, dict) or not isinstance(content.get("tokenizer"), dict):
        raise DataError(f"{index}: not an index of token shards; prepare the data again")
    return tokenizer_from_spec(content["tokenizer"], directory)


def tokenizer_from_spec(spec: dict[str, Any], directory: Path) -> Tokenizer:
    """Load the tokenizer that ``spec()`` described, with its files in ``directory``.

    Raises DataError if the files do not match the description.
    """
    for name in (spec.get("file"), spec.get("directory")):
        if isinstance(name, str) and (name in ("", ".", "..") or "/" in name):
            index = directory / INDEX_FILE
            raise DataError(f"{index}: the tokenizer {quote(name)} is not in this directory; prepare the data again")
    match spec:
        case {"kind": "bytes"}:
            return BytesTokenizer()
        case {"kind": "sentencepiece", "file": str(file), "sha256": str(sha256)}:
            return _load_sentencepiece(directory / file, sha256)
        case {"kind": "hf", "directory": str(folder), "name": str(name)}:
            if not (directory / folder).is_dir():
                raise DataError(
                    f"{directory / folder}: the tokenizer of these shards is missing; prepare the data again"
                )
            return HuggingFaceTokenizer(str(directory / folder), name)
    raise DataError(
        f"{directory}: the index does not describe a known kind of tokenizer: {shorten(spec)}; prepare the data again"
    )


def load_encoder(spec: dict[str, Any], directory: Path) -> Callable[[Sequence[str]], list[np.ndarray]]:
    """Return the ``encode_batch`` of the tokenizer that ``spec()`` described, loaded as fast as
    possible.

    Raises DataError if the files do not match the description.
    """
    backend = load_fast(directory) if spec.get("kind") == "hf" and spec.get("directory") == HF_DIRECTORY else None
    return partial(encode_fast, backend) if backend is not None else tokenizer_from_spec(spec, directory).encode_batch


def _load_sentencepiece(path: Path, sha256: str) -> Tokenizer:
    require_regular(path, "prepare the data again")
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from error
    if hashlib.sha256(model).hexdigest() != sha256:
        raise DataError(
            f"{path}: not the tokenizer that made these shards (its sha256 differs); prepare the data again"
        )
    return SentencePieceTokenizer(model)


# -- training --------------------------------------------------------------------------------------

_LINE_CHARACTERS = 16_000  # the trainer ignores "sentences" that are longer


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE model of exactly ``vocab_size`` tokens.

    The same texts in the same order give the same bytes. Raises DataError if the texts are too few
    for the size, or if the size is too small for their characters.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_cut_into_lines(_record_failure(texts, failures)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            # Lossless: nothing is normalised, added or removed. The trainer reserves newline and
            # tab, so they are tokens.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_TEXT,
            max_sentence_length=4 * _LINE_CHARACTERS + 1,
            num_threads=1,  # recorded in the model's bytes, which must not depend on the machine
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if failures:
            raise failures[0] from None
        raise DataError(_explain(str(error), vocab_size)) from error
    return model.getvalue()


def _record_failure(texts: Iterable[str], failures: list[BaseException]) -> Iterator[str]:
    """Pass ``texts`` on and record their exception, which the trainer replaces by its own error."""
    try:
        yield from texts
    except BaseException as error:
        failures.append(error)
        raise


def _cut_into_lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        start = 0
        # split() is not used, because its list takes several times the memory of the text.
        while start <= len(text):
            newline = text.find("\n", start)
            end = len(text) if newline < 0 else newline
            for first in range(start, end, _LINE_CHARACTERS):
                yield text[first : min(first + _LINE_CHARACTERS, end)]
            start = end + 1


def _explain(message: str, vocab_size: int) -> str:
    if found := re.search(r"value <= (\d+)", message):
        return (
            f"the corpus is too small for a SentencePiece vocabulary of {vocab_size:,}: it gives {found[1]} tokens;"
            f" use --vocab-size {found[1]} or less, --tokenizer bytes, or more text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"a SentencePiece vocabulary of {vocab_size:,} is too small: this corpus needs more than {found[1]} tokens"
        )
    if "sentences_.empty()" in message:
        return (
            "the corpus is empty, or all of it is held out (equal documents share a split): no text to train a "
            "SentencePiece tokenizer on; give more different documents"
        )
    return f"SentencePiece could not be trained with {vocab_size:,} tokens: {message}"
