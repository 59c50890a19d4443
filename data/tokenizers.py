"""Tokenizers: bytes, SentencePiece (BPE), Hugging Face; how they are named, trained and loaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece

from ..engine.errors import DataError, first_line, quote, shorten
from ..engine.files import write_whole
from .files import INDEX_FILE, read_index, require_regular

END_OF_TEXT = "<|endoftext|>"
SPACE_SYMBOL = "\u2581"  # SentencePiece's sign for a space; in a text, it is decoded as a space
MODEL_FILE = "tokenizer.model"
HF_DIRECTORY = "tokenizer"
_HUB_SECONDS = 10.0
DEFAULT_VOCAB_SIZE = 4096
_HF_PREFIX = "hf:"
_SMALLEST_VOCABULARY = 260  # unknown, end of text, newline, tab and the 256 bytes


class Tokenizer(Protocol):
    """The methods that a tokenizer must have, so that it can prepare data.

    ``decode(encode(text))`` is ``text``, and ``encode`` never returns the token ``end_of_text``.
    """

    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``. No BOS or other token is added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as :meth:`encode` does (uint32). Uses one thread."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. End-of-text tokens are left out."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return a description from which :func:`tokenizer_from_spec` loads the tokenizer again."""
        ...

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into ``directory``."""
        ...


@dataclass(frozen=True)
class Piece:
    """A token of a SentencePiece model.

    If ``mergeable``, the token is made by a merge of two neighbouring tokens. Merges into the token
    with the highest ``score`` come first.
    """

    text: str
    score: float
    mergeable: bool


class BytesTokenizer:
    """One token per UTF-8 byte; token 256 is end-of-text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_text).decode("utf-8", "replace")

    def spec(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def save(self, directory: Path) -> None:
        """Do nothing: this tokenizer has no files."""


class SentencePieceTokenizer:
    """A SentencePiece model with byte fallback, so it can encode every text without loss."""

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

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        plain = [text for text in texts if SPACE_SYMBOL not in text]
        encoded = iter(self._processor.encode(plain, out_type=int, num_threads=1) if plain else ())
        ids = (self.encode(text) if SPACE_SYMBOL in text else next(encoded) for text in texts)
        return [np.asarray(row, dtype=np.uint32) for row in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def pieces(self) -> Iterator[Piece]:
        """Yield all tokens in the order of ids, with spaces in place of SentencePiece's "▁"."""
        model = self._processor
        for number in range(self.vocab_size):
            special = model.is_control(number) or model.is_unknown(number) or model.is_byte(number)
            text = model.id_to_piece(number)
            yield Piece(text if special else text.replace(SPACE_SYMBOL, " "), model.get_score(number), not special)

    def spec(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "file": MODEL_FILE, "sha256": self._sha256}

    def save(self, directory: Path) -> None:
        write_whole(directory / MODEL_FILE, self._model)

    def _encode_plain(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)


class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``, from a local directory or from the hub (``location``).

    ``name`` is for messages and the index. ``separator`` is the token that ends a document. If
    given, it replaces the end-of-sequence token, also in the saved tokenizer. Raises DataError if
    the tokenizer cannot be loaded, or has no token that ends a document.
    """

    def __init__(self, location: str, name: str | None = None, separator: str | None = None) -> None:
        self._name = name or location
        self._tokenizer = _load_automatically(location)
        if separator is not None:
            if separator not in self._tokenizer.get_vocab():
                raise DataError(f"--separator: tokenizer {quote(self._name)} has no token {quote(separator)}")
            self._tokenizer.eos_token = separator
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"tokenizer {quote(self._name)} has no end-of-sequence token, which must separate documents; name "
                "another token with --separator"
            )
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_text: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        # If a text contains the spelling of a special token, this is text. It does not end the
        # document.
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    @property
    def bos(self) -> int:
        """The id of the BOS token. Raises DataError if the tokenizer has none."""
        if self._tokenizer.bos_token_id is None:
            raise DataError(f"--bos: tokenizer {quote(self._name)} has no token that begins a text; leave --bos out")
        return self._tokenizer.bos_token_id

    @property
    def begin_of_text(self) -> int:
        """The id of the BOS token, or ``end_of_text`` if the tokenizer has no BOS token."""
        begin = self._tokenizer.bos_token_id
        return self.end_of_text if begin is None else begin

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt. If it spells out a special token, that token is used.

        Special tokens such as BOS are added, unless ``text`` already begins with the first of them.
        """
        begin = self._tokenizer.decode(self.begin_of_text)
        return self._tokenizer.encode(text, add_special_tokens=not (begin and text.startswith(begin)), verbose=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):  # a tokenizer that is written in Python
            return [np.asarray(self.encode(text), dtype=np.uint32) for text in texts]
        return encode_fast(backend, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [i for i in ids if i != self.end_of_text], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def spec(self) -> dict[str, Any]:
        return {"kind": "hf", "name": self._name, "directory": HF_DIRECTORY}

    def save(self, directory: Path) -> None:
        self.save_pretrained(directory / HF_DIRECTORY)

    def save_pretrained(self, directory: Path) -> int | None:
        """Write files that ``transformers`` loads. Returns the id of the BOS token, or None."""
        self._tokenizer.save_pretrained(directory)
        return self._tokenizer.bos_token_id


def load_fast(directory: Path) -> Any:
    """Load the saved Hugging Face tokenizer of a prepared directory, without ``transformers``.

    Importing ``transformers`` takes seconds. Returns None for a tokenizer that is written in
    Python, which only ``transformers`` can load.
    """
    file = directory / HF_DIRECTORY / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer as FastTokenizer

    return FastTokenizer.from_file(str(file))


def encode_fast(backend: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return each text's ids (uint32) by the fast tokenizer ``backend``, without added tokens."""
    # The tokenizer's files may ask for these. A document is neither cut nor padded.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # a special token that is spelled out in a text is text
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)  # without offsets
    return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _load_automatically(location: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            f"tokenizer 'hf:{location}' needs the transformers package: pip install 'sdp-engine[huggingface]'"
        ) from error
    try:
        with _show_errors_only():
            return _load_from_disk_or_hub(AutoTokenizer, location)
    # Versions of the package and of its network library raise different classes.
    except Exception as error:
        raise DataError(f"tokenizer 'hf:{location}' cannot be loaded: {first_line(error)}") from error


def _load_from_disk_or_hub(auto_tokenizer: Any, location: str) -> Any:
    from huggingface_hub import HfApi

    local = Path(location).is_dir()
    try:
        # This finds a directory, or a copy in the hub's cache.
        return auto_tokenizer.from_pretrained(location, local_files_only=True, trust_remote_code=False)
    except Exception:
        if local:
            raise
    try:
        # Ask the hub one question first. Loading asks for several files, and for an unreachable
        # hub it repeats each request for 25 s.
        HfApi().model_info(location, timeout=_HUB_SECONDS)
    except Exception as error:
        raise DataError(
            f"no such directory, not in the cache, and the hub does not give it ({first_line(error)})"
        ) from error
    return auto_tokenizer.from_pretrained(location, trust_remote_code=False)


@contextlib.contextmanager
def _show_errors_only() -> Iterator[None]:
    """Silence the warnings of ``transformers`` and its hub. The exception has the relevant text."""
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


# -- by name, and of prepared data -----------------------------------------------------------------


def check_request(request: str, vocab_size: int | None) -> None:
    """Check the name of a tokenizer, and whether this tokenizer can have ``vocab_size`` tokens.

    Raises DataError unless ``request`` is ``bytes``, ``sentencepiece`` or ``hf:NAME``, and fits
    ``vocab_size``.
    """
    if request not in ("bytes", "sentencepiece") and not request.startswith(_HF_PREFIX):
        raise DataError(f"unknown tokenizer {quote(request)}: choose sentencepiece, bytes or hf:NAME")
    if request == _HF_PREFIX:
        raise DataError("hf: must be followed by a directory or a name on the hub, such as hf:gpt2")
    if request == "sentencepiece" and vocab_size is not None and vocab_size <= _SMALLEST_VOCABULARY:
        raise DataError(
            f"the vocabulary size must be more than {_SMALLEST_VOCABULARY}, because every byte is a token, but is "
            f"{vocab_size}"
        )
    if request == "bytes" and vocab_size not in (None, BytesTokenizer.vocab_size):
        raise DataError(
            f"the bytes tokenizer has {BytesTokenizer.vocab_size} tokens, not {vocab_size}: leave the size out"
        )
    if request.startswith(_HF_PREFIX) and vocab_size is not None:
        raise DataError(f"the vocabulary of {quote(request)} is fixed: leave the vocabulary size ({vocab_size}) out")


def request_of(spec: dict[str, Any]) -> str:
    """Return the tokenizer's name, as for ``sdp prepare --tokenizer``, from its description."""
    return f"{_HF_PREFIX}{spec.get('name')}" if spec.get("kind") == "hf" else str(spec.get("kind"))


def ready_made(request: str, separator: str | None = None) -> BytesTokenizer | HuggingFaceTokenizer | None:
    """Load the tokenizer that ``request`` names. Returns None for one that must be trained first.

    ``separator`` is the token that ends a document. Raises DataError if loading fails.
    """
    if request == "sentencepiece":
        return None
    if request == "bytes":
        return BytesTokenizer()
    return HuggingFaceTokenizer(request.removeprefix(_HF_PREFIX), separator=separator)


def make_tokenizer(request: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Load the tokenizer that ``request`` names, or train a SentencePiece tokenizer on ``texts``.

    Raises DataError if the tokenizer cannot be loaded or trained.
    """
    check_request(request, vocab_size)
    return ready_made(request) or SentencePieceTokenizer(train_sentencepiece(texts, vocab_size or DEFAULT_VOCAB_SIZE))


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a prepared directory.

    Raises DataError if it is missing, or is not the tokenizer that made the shards.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    content = read_index(index, f"no {INDEX_FILE}; run sdp prepare first", "prepare the data again")
    if not isinstance(content, dict) or not isinstance(content.get("tokenizer"), dict):
        raise DataError(f"{index}: not an index of token shards; prepare the data again")
    return tokenizer_from_spec(content["tokenizer"], directory)


def tokenizer_from_spec(spec: dict[str, Any], directory: Path) -> Tokenizer:
    """Load a tokenizer from its description ``spec`` and its files in ``directory``.

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
    """Return ``encode_batch`` of the tokenizer that ``spec`` describes, loaded in the fastest way.

    Raises DataError if the files in ``directory`` do not match the description.
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
    """Train a BPE model of exactly ``vocab_size`` tokens, and return the bytes of its file.

    The same texts in the same order give the same bytes. Raises DataError if there is too little
    text for ``vocab_size`` tokens, or if the texts have too many different characters for it.
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
    """Yield ``texts`` and record their exception, which the trainer replaces by another one."""
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
            f"the corpus is too small for a SentencePiece vocabulary of {vocab_size:,}: it has only {found[1]} "
            f"tokens; use --vocab-size {found[1]} or less, --tokenizer bytes, or more text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"a SentencePiece vocabulary of {vocab_size:,} is too small: this corpus needs more than {found[1]} tokens"
        )
    if "sentences_.empty()" in message:
        return (
            "there is no text to train a SentencePiece tokenizer, because the corpus is empty or all of it is held "
            "out (equal documents are in the same split); give more different documents"
        )
    return f"SentencePiece could not be trained with {vocab_size:,} tokens: {message}"
