"""Encodes documents as tokens, with the same result for any number of processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..engine.environment.detect import export, exported
from ..engine.errors import LaunchError
from ..engine.json_files import parse_json
from .sources import UNCOUNTED, Document
from .tokenizers import Tokenizer, load_encoder, tokenizer_from_spec

BATCH_CHARACTERS = 1_000_000
LONG_CHARACTERS = 8_000_000  # longer documents are encoded in pieces, in this process
_HASHED_CHARACTERS = 2**20
PIECE_CHARACTERS = 2**18
_CONTEXT_CHARACTERS = 256
_CANDIDATES = 8

# Cuts after the end of a line are tried first, then cuts before a space.
_BOUNDARIES = (re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)(?= )"))
_AHEAD_PER_WORKER = 3
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}  # per process, because there is a process for each core


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of some consecutive documents, or of a part of one long document.

    Attributes:
        tokens: For each split, its tokens. An end-of-text token follows every document.
        documents: For each split, the number of documents that end in this batch.
        text_bytes: The size of the texts in UTF-8, in bytes.
        source_bytes: The bytes of the files that were read for these documents.
        without_text: The number of documents that were left out because they are empty.
    """

    tokens: dict[str, np.ndarray]
    documents: dict[str, int]
    text_bytes: int
    source_bytes: int
    without_text: int


@dataclass(frozen=True)
class _Arguments:
    """What every process needs to encode. ``spec`` is the tokenizer's description as JSON."""

    spec: str
    end_of_text: int
    directory: str
    held_out: float
    begin: int | None = None


def split_of(document: Document, held_out: float) -> str:
    """Choose a document's split: a fraction ``held_out`` goes to "held_out", the rest to "train".

    A hash decides: of the document's ``split_key`` if it has one, else of its content.
    """
    return "held_out" if _position(document) < held_out else "train"


def threshold_of(documents: Iterable[Document], held_out: float) -> float:
    """Return the fraction for :func:`split_of` with which no split is empty.

    This is ``held_out``, unless a split of a small corpus would be empty by chance. Then the
    fraction is changed just enough to move one document into that split. If there is one document,
    or all are equal, one split stays empty.
    """
    lowest, highest = math.inf, -math.inf
    for document in documents:
        if not document.is_empty:
            position = _position(document)
            lowest, highest = min(lowest, position), max(highest, position)
            if lowest < held_out <= highest:
                return held_out
        del document  # free its memory before the next one is read
    if lowest >= highest:  # one document, or only equal ones
        return held_out
    return math.nextafter(lowest, 1) if lowest >= held_out else highest


def _position(document: Document) -> float:
    """Return a number from 0 to 1 that depends only on the document's key or content."""
    digest = hashlib.sha256(b"" if document.tokens is None else document.tokens.tobytes())
    for piece in _utf8(document.text if document.split_key is None else document.split_key):
        digest.update(piece)
    return int.from_bytes(digest.digest()[:8], "big") / 2**64


def encode_documents(
    documents: Iterable[Document],
    spec: dict[str, Any],
    end_of_text: int,
    directory: Path,
    held_out: float,
    workers: int,
    begin: int | None = None,
) -> Iterator[EncodedBatch]:
    """Encode documents, and yield their tokens in order.

    Processes are spawned, because a fork could inherit locks of this process's threads. A script
    that calls this function therefore needs the usual ``if __name__ == "__main__"``.

    Args:
        documents: The documents. A very long document is encoded in this process, so that only one
            copy of it is in memory.
        spec: The tokenizer's description, with which every process loads the tokenizer.
        end_of_text: The token to put after each document.
        directory: The folder with the tokenizer's files.
        held_out: The fraction of documents that are held out.
        workers: The number of processes; 1 uses only this process.
        begin: The token to put before each text. If None, no token is added.

    Raises:
        LaunchError: A process died.
    """
    arguments = _Arguments(json.dumps(spec), end_of_text, str(directory), held_out, begin)
    with contextlib.ExitStack() as ended:
        if workers == 1:
            ended.enter_context(exported(_ONE_THREAD))
            pool = None
        else:
            pool = _Workers(workers, arguments)
            ended.callback(pool.close)
        # The number of pending batches is limited, so that the reader does not fill the memory.
        pending: deque[Future[EncodedBatch]] = deque()
        for batch in _batches(documents):
            if len(batch) == 1 and len(batch[0].text) > LONG_CHARACTERS:
                while pending:
                    yield pending.popleft().result()
                yield from _encode_long(arguments, batch.pop())
            elif pool is None:
                yield _encode_batch(arguments, batch)
            else:
                pending.append(pool.submit(batch))
                if len(pending) > _AHEAD_PER_WORKER * workers:
                    yield pending.popleft().result()
            del batch  # else it would stay in memory while the next one is read
        while pending:
            yield pending.popleft().result()


class _Workers:
    """Processes that encode batches. A thread for each of them waits for its results.

    Each process has a pipe of its own. So a process that is killed while it writes a result is
    noticed at once, which ProcessPoolExecutor's shared pipe does not allow.
    """

    def __init__(self, count: int, arguments: _Arguments):
        context = multiprocessing.get_context("spawn")
        self._threads = ThreadPoolExecutor(count)
        self._idle: SimpleQueue[Any] = SimpleQueue()  # connections
        self._processes = []
        for _ in range(count):
            near, there = context.Pipe()
            process = context.Process(target=_work, args=(there, arguments), daemon=True)
            self._processes.append(process)
            process.start()
            there.close()  # so that the pipe ends with the process
            self._idle.put(near)

    def submit(self, batch: list[Document]) -> Future[EncodedBatch]:
        """Let a process encode ``batch``. The result raises LaunchError if the process ends."""
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: list[Document]) -> EncodedBatch:
        connection = self._idle.get()
        try:
            connection.send(batch)
            result = connection.recv()
        except (EOFError, OSError) as error:
            raise LaunchError(
                "a worker process ended unexpectedly (out of memory, or a calling script without "
                '`if __name__ == "__main__"`); use fewer workers, or 1, which starts no process'
            ) from error
        finally:
            self._idle.put(connection)
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End all processes and threads."""
        for process in self._processes:
            process.terminate()
        self._threads.shutdown(cancel_futures=True)


def _work(connection: Connection, arguments: _Arguments) -> None:
    """Encode the batches that arrive, until the other end is closed."""
    # Ctrl-C reaches every process of the terminal. The command ends its workers, and they must
    # not print tracebacks of their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    export(_ONE_THREAD)
    with contextlib.suppress(EOFError, OSError):  # the command has ended
        while True:
            batch = connection.recv()
            try:
                result: Any = _encode_batch(arguments, batch)
            except Exception as error:  # it is raised in the command
                result = error
            connection.send(result)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Make lists of documents of about equal length. A long document has a list of its own.

    The consumer may empty a list to free the memory of its documents.
    """
    batch: list[Document] = []
    characters = 0
    for document in documents:
        length = len(document.text if document.tokens is None else document.tokens)
        if length > LONG_CHARACTERS and document.tokens is None:
            if batch:
                yield batch
            batch, characters = [document], BATCH_CHARACTERS
        else:
            batch.append(document)
            characters += max(length, 1)  # a million empty documents also make a batch
        del document  # else it would stay in memory while the next one is read
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(arguments: _Arguments, documents: list[Document]) -> EncodedBatch:
    encode = _encoder(arguments.spec, arguments.directory)
    ids: dict[str, list[np.ndarray]] = {}
    kept = [document for document in documents if not document.is_empty]
    encoded = iter(encode([document.text for document in kept if document.tokens is None]))
    end = np.asarray([arguments.end_of_text], dtype=np.uint32)
    for document in kept:
        given = document.tokens
        if given is None:
            parts = (np.concatenate([_begin(arguments), next(encoded)]), end)
        else:  # a document of tokens may end with this token itself
            parts = (given, (end + np.uint32(UNCOUNTED))[: int(given[-1] % UNCOUNTED != arguments.end_of_text)])
        ids.setdefault(split_of(document, arguments.held_out), []).extend(parts)
    return EncodedBatch(
        tokens={split: np.concatenate(parts) for split, parts in ids.items()},
        documents={split: len(parts) // 2 for split, parts in ids.items()},
        text_bytes=sum(len(document.text.encode()) for document in documents),
        source_bytes=sum(document.source_bytes for document in documents),
        without_text=len(documents) - len(kept),
    )


def _encode_long(arguments: _Arguments, document: Document) -> Iterator[EncodedBatch]:
    """Encode one long document in batches. Only the last batch counts the document."""
    tokenizer = _tokenizer(arguments.spec, arguments.directory)
    split = split_of(document, arguments.held_out)
    if arguments.begin is not None:
        yield EncodedBatch({split: _begin(arguments)}, {split: 0}, 0, 0, 0)
    for piece in cut_text(document.text, tokenizer):
        tokens = np.asarray(tokenizer.encode(piece), dtype=np.uint32)
        yield EncodedBatch({split: tokens}, {split: 0}, sum(map(len, _utf8(piece))), 0, 0)
    end = np.asarray([tokenizer.end_of_text], dtype=np.uint32)
    yield EncodedBatch({split: end}, {split: 1}, 0, document.source_bytes, 0)


def _begin(arguments: _Arguments) -> np.ndarray:
    return np.asarray([] if arguments.begin is None else [arguments.begin], dtype=np.uint32)


def _utf8(text: str) -> Iterator[bytes]:
    """Encode ``text`` as UTF-8 in pieces, so that a long text is not copied as a whole."""
    for start in range(0, len(text), _HASHED_CHARACTERS):
        yield text[start : start + _HASHED_CHARACTERS].encode()


# A tokenizer needs many times the memory of its input, so a document of hundreds of megabytes is
# encoded in pieces.


def cut_text(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Cut a long text into pieces that can be encoded one after the other, and yield them in order.

    Cuts are made where they do not change the tokens: both sides of the cut, encoded separately,
    give the same tokens as together. A megabyte of one letter may have no such place. Then the text
    is cut where at least both sides still decode to the same text. If there is no such place
    either, the piece becomes longer. This happens with tokenizers that add a space to the start of
    every text.
    """
    start, end = 0, PIECE_CHARACTERS
    while end < len(text):
        cut = _find_cut(text, end, tokenizer)
        if cut is not None:
            yield text[start:cut]
            start, end = cut, cut
        end += PIECE_CHARACTERS
    yield text[start:]


def _find_cut(text: str, end: int, tokenizer: Tokenizer) -> int | None:
    """Find a position for a cut at ``end`` or at most half a piece before it, or return None."""
    first = end - PIECE_CHARACTERS // 2
    for boundary in _BOUNDARIES:
        boundaries = [match.end() for match in boundary.finditer(text, first, end)]
        for cut in boundaries[: -_CANDIDATES - 1 : -1]:
            if _keeps_tokens(text, cut, tokenizer):
                return cut
    return end if _keeps_text(text, end, tokenizer) else None


def _around(text: str, cut: int) -> tuple[str, str]:
    return text[max(0, cut - _CONTEXT_CHARACTERS) : cut], text[cut : cut + _CONTEXT_CHARACTERS]


def _keeps_tokens(text: str, cut: int, tokenizer: Tokenizer) -> bool:
    left, right = _around(text, cut)
    return tokenizer.encode(left) + tokenizer.encode(right) == tokenizer.encode(left + right)


def _keeps_text(text: str, cut: int, tokenizer: Tokenizer) -> bool:
    left, right = _around(text, cut)
    return tokenizer.decode(tokenizer.encode(left) + tokenizer.encode(right)) == left + right


@functools.lru_cache(maxsize=1)
def _encoder(spec: str, directory: str) -> Callable[[Sequence[str]], list[np.ndarray]]:
    return load_encoder(parse_json(spec), Path(directory))


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str, directory: str) -> Tokenizer:
    return tokenizer_from_spec(parse_json(spec), Path(directory))
