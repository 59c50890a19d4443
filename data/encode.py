"""Documents → token arrays, in processes; the result is the same for any number of them."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import LaunchError
from .sources import Document
from .tokenizers import Tokenizer, tokenizer_from_spec

_BATCH_CHARACTERS = 1_000_000
_AHEAD_PER_WORKER = 3


@dataclass(frozen=True)
class EncodedBatch:
    """Some consecutive documents: per split their tokens with an end-of-text token after each; sizes in bytes.

    ``without_text``: documents that are left out because they are empty.
    """

    tokens: dict[str, np.ndarray]
    documents: dict[str, int]
    text_bytes: int
    source_bytes: int
    without_text: int


def split_of(document: Document, held_out: float) -> str:
    """``held_out`` for the given fraction of documents, else ``train``; depends on the document's key or text alone."""
    key = document.text if document.split_key is None else document.split_key
    fraction = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "held_out" if fraction < held_out else "train"


def encode_documents(
    documents: Iterable[Document], spec: dict[str, Any], directory: Path, held_out: float, workers: int
) -> Iterator[EncodedBatch]:
    """Encode all documents in order with ``workers`` processes (1: in this one).

    spec, directory: of the tokenizer, which every process loads itself. Processes are spawned, so a script that calls
    this needs the usual ``if __name__ == "__main__"``; a fork could inherit the locks of this process's threads.
    Raises LaunchError where a process dies.
    """
    encode = functools.partial(_encode_batch, json.dumps(spec), str(directory), held_out)
    if workers == 1:
        yield from map(encode, _batches(documents))
        return
    # Ctrl-C reaches every process of the terminal: this one ends the workers, which must not print tracebacks of their own.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        # A bounded window: the reader must not run ahead of the encoders and fill the memory.
        pending: deque[Future[EncodedBatch]] = deque()
        for batch in _batches(documents):
            pending.append(pool.submit(encode, batch))
            if len(pending) > _AHEAD_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise LaunchError(
            "a worker process ended unexpectedly (out of memory, or a calling script without"
            ' `if __name__ == "__main__"`): try fewer workers; 1 needs no process'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += max(len(document.text), 1)  # also a million empty ones are a batch
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(spec: str, directory: str, held_out: float, documents: list[Document]) -> EncodedBatch:
    tokenizer = _tokenizer(spec, directory)
    ids: dict[str, list[np.ndarray]] = {}
    with_text = [document for document in documents if document.text]
    for document in with_text:
        tokens = np.asarray([*tokenizer.encode(document.text), tokenizer.end_of_text], dtype=np.uint32)
        ids.setdefault(split_of(document, held_out), []).append(tokens)
    return EncodedBatch(
        tokens={split: np.concatenate(parts) for split, parts in ids.items()},
        documents={split: len(parts) for split, parts in ids.items()},
        text_bytes=sum(len(document.text.encode()) for document in documents),
        source_bytes=sum(document.source_bytes for document in documents),
        without_text=len(documents) - len(with_text),
    )


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str, directory: str) -> Tokenizer:
    return tokenizer_from_spec(json.loads(spec), Path(directory))
