"""Trains a SentencePiece tokenizer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from ...engine.errors import DataError
from .kinds import END_OF_TEXT

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
