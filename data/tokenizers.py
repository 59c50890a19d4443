"""Text to token ids and back: bytes, SentencePiece (BPE) and Hugging Face tokenizers behind one small protocol."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from ..engine.errors import DataError

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
INDEX_FILE = "index.json"
_MODEL_FILE = "tokenizer.model"
_HF_DIRECTORY = "tokenizer"
_HF_PREFIX = "hf:"
_HUB_SECONDS = 10.0
_SMALLEST_VOCABULARY = 260  # unknown, end of text, newline, tab and the 256 bytes
_LINE_CHARACTERS = 16_000  # the trainer ignores longer "sentences"
SPACE_SYMBOL = "\u2581"  # SentencePiece spells a space so, and would decode a real one as a space


class Tokenizer(Protocol):
    """What the data room needs: ``decode(encode(text)) == text``, and no text has ``end_of_text`` in it."""

    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without any token added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; end-of-text becomes nothing."""
        ...

    def spec(self) -> dict[str, Any]:
        """What the index records, enough for ``tokenizer_from_spec``."""
        ...

    def save(self, directory: Path) -> None:
        """Write the files that ``spec`` names into ``directory``."""
        ...


@dataclass(frozen=True)
class Piece:
    """A token of a SentencePiece model. ``mergeable``: neighbours may become it; the best ``score`` goes first."""

    text: str
    score: float
    mergeable: bool


class BytesTokenizer:
    """One token a UTF-8 byte, and 256 for end-of-text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_text).decode("utf-8", "replace")

    def spec(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def save(self, directory: Path) -> None:
        """Nothing to save."""


class SentencePieceTokenizer:
    """A SentencePiece model with byte fallback that gives back every character, also spaces, tabs and newlines."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.end_of_text: int = self._processor.eos_id()
        self._space_symbol = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE_SYMBOL)):
            ids += [*self._space_symbol, *self._encode_plain(part)] if i else self._encode_plain(part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def pieces(self) -> Iterator[Piece]:
        """All tokens in the order of their ids, with plain spaces."""
        model = self._processor
        for number in range(self.vocab_size):
            special = model.is_control(number) or model.is_unknown(number) or model.is_byte(number)
            text = model.id_to_piece(number)
            yield Piece(text if special else text.replace(SPACE_SYMBOL, " "), model.get_score(number), not special)

    def spec(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "file": _MODEL_FILE, "sha256": self._sha256}

    def save(self, directory: Path) -> None:
        temporary = directory / f"{_MODEL_FILE}.tmp"
        temporary.write_bytes(self._model)
        temporary.replace(directory / _MODEL_FILE)


class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``, from a local directory or the hub; DataError where it has no end-of-text."""

    def __init__(self, location: str, name: str | None = None) -> None:
        self._name = name or location
        self._tokenizer = _auto_tokenizer(location)
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer {self._name!r} has no end-of-sequence token, which must separate documents")
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_text: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        # A special token spelled out in a text is text, not an end of document.
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [i for i in ids if i != self.end_of_text], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def spec(self) -> dict[str, Any]:
        return {"kind": "hf", "name": self._name, "directory": _HF_DIRECTORY}

    def save(self, directory: Path) -> None:
        self.save_pretrained(directory / _HF_DIRECTORY)

    def save_pretrained(self, directory: Path) -> int | None:
        """Write its files; returns the id of the token that begins a text, None where there is none."""
        self._tokenizer.save_pretrained(directory)
        return self._tokenizer.bos_token_id


def _auto_tokenizer(location: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            f"tokenizer 'hf:{location}' needs the transformers package: pip install 'sdp-engine[huggingface]'"
        ) from error
    try:
        with _errors_only():
            return _from_disk_or_hub(AutoTokenizer, location)
    except Exception as error:  # each version of the package and of its network library raises others
        raise DataError(f"tokenizer 'hf:{location}' cannot be loaded: {_first_line(error)}") from error


def _from_disk_or_hub(auto_tokenizer: Any, location: str) -> Any:
    from huggingface_hub import HfApi

    local = Path(location).is_dir()
    try:
        return auto_tokenizer.from_pretrained(location, local_files_only=True)  # a directory, or in the hub's cache
    except Exception:
        if local:
            raise
    try:
        # One question first: loading asks for several files and repeats each for 25 s where the hub cannot be reached.
        HfApi().model_info(location, timeout=_HUB_SECONDS)
    except Exception as error:
        raise DataError(
            f"no such directory, not in the cache, and the hub does not give it ({_first_line(error)})"
        ) from error
    return auto_tokenizer.from_pretrained(location)


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Silence the warnings of ``transformers`` and its hub: what matters of them is in the exception."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    before = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_request(request: str, vocab_size: int | None) -> None:
    """Raise DataError unless ``request`` is ``bytes``, ``sentencepiece`` or ``hf:NAME`` and fits ``vocab_size``."""
    if request not in ("bytes", "sentencepiece") and not request.startswith(_HF_PREFIX):
        raise DataError(f"unknown tokenizer {request!r}: choose sentencepiece, bytes or hf:NAME")
    if request == _HF_PREFIX:
        raise DataError("hf: must be followed by a directory or a name on the hub, as in hf:gpt2")
    if request == "sentencepiece" and vocab_size is not None and vocab_size <= _SMALLEST_VOCABULARY:
        raise DataError(
            f"the vocabulary size must be more than {_SMALLEST_VOCABULARY}, every byte being a token; it is {vocab_size}"
        )
    if request == "bytes" and vocab_size not in (None, BytesTokenizer.vocab_size):
        raise DataError(
            f"the bytes tokenizer has {BytesTokenizer.vocab_size} tokens, not {vocab_size}: leave the size out"
        )
    if request.startswith(_HF_PREFIX) and vocab_size is not None:
        raise DataError(f"the vocabulary of {request!r} is fixed: leave the vocabulary size ({vocab_size}) out")


def request_of(spec: dict[str, Any]) -> str:
    """The request that a tokenizer of this ``spec()`` was made for."""
    return f"{_HF_PREFIX}{spec.get('name')}" if spec.get("kind") == "hf" else str(spec.get("kind"))


def ready_made(request: str) -> BytesTokenizer | HuggingFaceTokenizer | None:
    """The tokenizer that ``request`` names, None where it is yet to be trained; raises DataError where it cannot be loaded."""
    if request == "sentencepiece":
        return None
    return BytesTokenizer() if request == "bytes" else HuggingFaceTokenizer(request.removeprefix(_HF_PREFIX))


def make_tokenizer(request: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that ``request`` names.

    texts: what SentencePiece learns from; not read for the others. Raises DataError where it cannot be made.
    """
    check_request(request, vocab_size)
    return ready_made(request) or SentencePieceTokenizer(train_sentencepiece(texts, vocab_size or DEFAULT_VOCAB_SIZE))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """A BPE model of exactly ``vocab_size`` tokens, the same bytes for the same texts in the same order.

    Raises DataError where the texts are too few for the size, or the size too small for their characters.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(_noting(texts, failures)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            # Lossless: nothing normalised, added or removed; newline and tab, which the trainer reserves, are tokens.
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
        raise DataError(_training_error(str(error), vocab_size)) from error
    return model.getvalue()


def _noting(texts: Iterable[str], failures: list[BaseException]) -> Iterator[str]:
    """Hand ``texts`` on; the trainer turns what a damaged corpus or Ctrl-C raises into an error of its own."""
    try:
        yield from texts
    except BaseException as error:
        failures.append(error)
        raise


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def _training_error(message: str, vocab_size: int) -> str:
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
        return "the corpus is empty, or all of it is held out: no text to train a SentencePiece tokenizer on"
    return f"SentencePiece could not be trained with {vocab_size:,} tokens: {message}"


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a prepared directory; raises DataError where it is missing or not the one of its shards."""
    directory = Path(directory)
    try:
        spec = json.loads((directory / INDEX_FILE).read_text())["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{directory / INDEX_FILE}: no index of token shards ({error}); run sdp prepare first"
        ) from error
    return tokenizer_from_spec(spec, directory)


def tokenizer_from_spec(spec: dict[str, Any], directory: Path) -> Tokenizer:
    """The tokenizer that ``spec()`` described, with its files in ``directory``; raises DataError if they do not fit."""
    for name in (spec.get("file"), spec.get("directory")):
        if isinstance(name, str) and (name in ("", ".", "..") or "/" in name):
            index = directory / INDEX_FILE
            raise DataError(f"{index}: the tokenizer {name!r} is not in this directory; prepare the data again")
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
        f"{directory}: the index does not describe a known kind of tokenizer: {spec}; prepare the data again"
    )


def _load_sentencepiece(path: Path, sha256: str) -> Tokenizer:
    if path.exists() and not path.is_file():  # reading a FIFO would hang
        raise DataError(f"{path}: is not a regular file; prepare the data again")
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from error
    if hashlib.sha256(model).hexdigest() != sha256:
        raise DataError(
            f"{path}: not the tokenizer that made these shards (its sha256 differs); prepare the data again"
        )
    return SentencePieceTokenizer(model)
