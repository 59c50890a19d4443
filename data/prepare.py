"""The work of ``sdp prepare``: turns a corpus into a directory of token shards with an index."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from ..engine.accounting.quantities import format_bytes
from ..engine.environment.process import usable_cores
from ..engine.errors import DataError, escape
from .corpus import StandardLibrary, standard_library
from .encode import EncodedBatch, encode_documents, split_of, threshold_of
from .index import SPLITS, Corpus, Index, Shard, Split
from .output import (
    check_writable,
    clear,
    find_index,
    missing_directories,
    nothing_left_on_error,
    only_writer,
    other_data,
    writing,
)
from .sources import MAX_DOCUMENT_BYTES, UNCOUNTED, Document, FileCorpus, Source, expand_inputs
from .tokenizers import DEFAULT_VOCAB_SIZE, HuggingFaceTokenizer, Tokenizer, check_request, make_tokenizer, ready_made

DEFAULT_SHARD_TOKENS = 2**26  # 128 MiB of uint16
TOKENIZER_SAMPLE_BYTES = 64 * 2**20
_PLAIN_LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`prepare` on which the tokens depend. The index records them.

    Equal settings and equal corpora give equal shards. An index of an older version has no ``bos``
    and no ``separator``, which then count as None.
    """

    tokenizer: str
    vocab_size: int | None
    text_column: str
    held_out: float
    seed: int
    shard_tokens: int
    bos: bool | None
    separator: str | None


def prepare(
    inputs: Sequence[str] | None,
    output: str | Path,
    tokenizer: str = "sentencepiece",
    vocab_size: int | None = None,
    text_column: str = "text",
    held_out: float = 0.05,
    workers: int | None = None,
    seed: int = 0,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: bool = True,
    overwrite: bool = False,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    names: Sequence[str] | None = None,
    bos: bool = False,
    separator: str | None = None,
) -> dict[str, Any]:
    """Encode a corpus into token shards in ``output``.

    An output that already has the same corpus with the same settings stays as it is. After an
    error, nothing that this call wrote is left. The memory is at most three times the longest
    document (in .parquet: the largest page), plus a constant. It is more if a Hugging Face
    tokenizer cannot cut a document, and for texts with characters beyond U+FFFF, which need four
    bytes for each character.

    Args:
        inputs: Files, folders and glob patterns, of the kinds in ``SUFFIXES``. None means Python's
            standard library.
        output: The directory for shards, tokenizer and index.
        tokenizer: ``sentencepiece`` (trained on training documents), ``bytes`` or ``hf:NAME``.
        vocab_size: Tokens of a trained tokenizer. The size of other tokenizers is fixed.
        text_column: The key or column of the text in .jsonl, .csv, .parquet and .arrow files.
        held_out: The fraction of documents for the split ``held_out``, chosen by a hash.
        workers: Processes, by default one per core. The result does not depend on it.
        seed: The seed by which documents are chosen to train the tokenizer.
        shard_tokens: The largest number of tokens in a file.
        progress: Show a bar, or plain lines if stderr is not a terminal.
        overwrite: Replace other data in ``output``.
        max_document_bytes: The largest size of a document. A larger document is an error.
        names: Names of the inputs to record in the index. By default, their paths.
        bos: Whether to put the BOS token of a Hugging Face tokenizer before each text.
        separator: The token of a Hugging Face tokenizer to put after each document, by default its
            end-of-sequence token.

    Returns:
        The index, which is the content of ``index.json``.

    Raises:
        DataError: The input is bad or too large, a split is empty, or the output has other data.
    """
    check_request(tokenizer, vocab_size)
    if (bos or separator is not None) and not tokenizer.startswith("hf:"):
        option = "--bos" if bos else "--separator"
        raise DataError(
            f"{option}: has an effect only with a tokenizer of Hugging Face (hf:NAME), not with "
            f"{tokenizer}; leave it out"
        )
    if tokenizer == "sentencepiece" and vocab_size is None:
        vocab_size = DEFAULT_VOCAB_SIZE
    settings = Settings(tokenizer, vocab_size, text_column, held_out, seed, shard_tokens, bos or None, separator)
    _check(settings, workers, max_document_bytes)
    directory = Path(output)
    corpus: StandardLibrary | FileCorpus
    if inputs is None:
        corpus, found = standard_library(), [f"the standard library of Python {platform.python_version()}"]
    else:
        corpus, found = FileCorpus(expand_inputs(inputs), text_column, max_document_bytes), list(inputs)
    names = found if names is None else list(names)
    # Find the user's mistakes before the first line of progress, and before terabytes are hashed.
    first = next(corpus.documents(), None)
    of_tokens = first is not None and first.tokens is not None
    if of_tokens and tokenizer == "sentencepiece":
        raise DataError(
            "the documents are token ids (input_ids); name the tokenizer that made them, for example --tokenizer hf:DIR"
        )
    existing = find_index(directory, vars(settings), overwrite=overwrite)
    if existing is None:
        check_writable(directory)
    ready = None if existing else ready_made(tokenizer, separator)
    _say(f"reading {', '.join(names)}{'' if inputs else ', as no input is named'}", progress)
    sources = corpus.sources()
    digest = hashlib.sha256("".join(source.sha256 for source in sources).encode()).hexdigest()
    if existing is not None and existing.corpus.sha256 == digest:
        _say(f"{directory} already has this corpus with these settings; nothing to do", progress)
        return existing.model_dump()
    if existing is not None and not overwrite:
        raise other_data(directory, ["the corpus"])
    new = missing_directories(directory)
    with only_writer(directory):
        clear(directory, overwrite=overwrite)
        with nothing_left_on_error(directory, new):
            processes = workers or usable_cores()
            index = _make(
                corpus, names, sources, digest, settings, ready, directory, processes, progress, of_tokens=of_tokens
            )
            with writing(directory):
                index.save(directory)
    return index.model_dump()


def _make(
    corpus: StandardLibrary | FileCorpus,
    names: list[str],
    sources: list[Source],
    digest: str,
    settings: Settings,
    ready: Tokenizer | None,
    directory: Path,
    workers: int,
    progress: bool,
    *,
    of_tokens: bool,
) -> Index:
    """Write tokenizer and shards into the empty ``directory`` and return its index."""
    chosen = replace(settings, held_out=threshold_of(corpus.documents(), settings.held_out))
    if settings.tokenizer == "sentencepiece":
        _say(f"training a SentencePiece tokenizer of {settings.vocab_size:,} tokens", progress)
    made = ready or make_tokenizer(settings.tokenizer, settings.vocab_size, sample_texts(corpus, sources, chosen))
    with writing(directory):
        made.save(directory)
    total_bytes = sum(source.bytes for source in sources)
    documents = _of_one_kind(corpus.documents(), of_tokens=of_tokens)
    begin = made.bos if settings.bos and isinstance(made, HuggingFaceTokenizer) else None
    encoded = encode_documents(documents, made.spec(), made.end_of_text, directory, chosen.held_out, workers, begin)
    splits, counts = _write(
        directory, _with_progress(encoded, total_bytes, progress), made, settings, of_tokens=of_tokens
    )
    if counts["without_text"]:
        _say(f"left out {counts['without_text']:,} document(s) without text (empty or null)", progress)
    return Index(
        tokenizer=made.spec(),
        vocab_size=made.vocab_size,
        end_of_text=made.end_of_text,
        dtype="uint32" if of_tokens else dtype_name(made.vocab_size),
        masks_labels=of_tokens,
        splits=splits,
        corpus=Corpus(
            sources=names,
            sha256=digest,
            files=len(sources),
            bytes=total_bytes,
            documents=counts["documents"],
            text_bytes=counts["text_bytes"],
        ),
        settings=vars(settings),
    )


def _say(line: str, progress: bool) -> None:
    if progress:
        print(escape(line), file=sys.stderr, flush=True)


def _check(settings: Settings, workers: int | None, max_document_bytes: int) -> None:
    if not 0 < settings.held_out < 1:
        raise DataError(f"the held-out fraction must be between 0 and 1, but is {settings.held_out}")
    if workers is not None and workers < 1:
        raise DataError(f"the number of workers must be at least 1, but is {workers}")
    if settings.shard_tokens < 1:
        raise DataError(f"shard_tokens must be at least 1, but is {settings.shard_tokens}")
    if max_document_bytes < 1:
        raise DataError(f"max_document_bytes must be at least 1, but is {max_document_bytes}")


def sample_texts(corpus: StandardLibrary | FileCorpus, sources: list[Source], settings: Settings) -> Iterator[str]:
    """Yield training documents, of about TOKENIZER_SAMPLE_BYTES in total, to train the tokenizer.

    Small files give all of their documents, and large files give about equal amounts.
    """
    order = list(range(len(sources)))
    random.Random(settings.seed).shuffle(order)
    limit = quota([source.bytes for source in sources], TOKENIZER_SAMPLE_BYTES)
    left = TOKENIZER_SAMPLE_BYTES
    for piece in order:
        taken = 0
        for document in corpus.documents(piece):
            if split_of(document, settings.held_out) == "train":
                yield document.text[:TOKENIZER_SAMPLE_BYTES]
            # A compressed source has fewer bytes than its text.
            taken += max(document.source_bytes, len(document.text))
            del document  # free its memory before the next one is read
            if taken >= min(limit, left):
                break
        left -= taken
        if left <= 0:
            return


def quota(sizes: list[int], budget: int) -> float:
    """Return how many bytes to take from each file at most, so that all together give ``budget``.

    If the sizes of all files add up to less, the result is infinite.
    """
    for taken, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - taken) >= budget:
            return budget / (len(sizes) - taken)
        budget -= size
    return math.inf


def _of_one_kind(documents: Iterable[Document], *, of_tokens: bool) -> Iterator[Document]:
    """Yield the documents. Raises DataError if some have tokens and others have text."""
    for document in documents:
        if not document.is_empty and (document.tokens is not None) != of_tokens:
            raise DataError(
                "some documents are text and some are input_ids; prepare them in two directories, and mix these with "
                "data.sources"
            )
        yield document
        del document  # free its memory before the next one is read


class ShardWriter:
    """Writes a stream of tokens to files ``SPLIT-NNNNN.bin`` of at most ``shard_tokens`` tokens.

    An unfinished file has the suffix ``.tmp``. ``dtype`` is a little-endian unsigned NumPy type.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype, shard_tokens: int, end_of_text: int) -> None:
        self._directory = directory
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._end_of_text = end_of_text
        self._shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._tokens = 0
        self._documents = 0
        self._sha256 = hashlib.sha256()

    @property
    def tokens(self) -> int:
        """Tokens written so far, in all shards."""
        return sum(shard.tokens for shard in self._shards) + self._tokens

    def write(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (1-D, with end-of-text tokens). A full file is followed by a new one.

        Raises DataError if the file cannot be written.
        """
        with writing(self._directory):
            while len(tokens):
                if self._file is None:
                    self._file = self._path(".tmp").open("wb")
                part, tokens = np.split(tokens, [self._shard_tokens - self._tokens])
                data = part.astype(self._dtype).tobytes()
                self._file.write(data)
                self._sha256.update(data)
                self._tokens += len(part)
                self._documents += int((part % UNCOUNTED == self._end_of_text).sum())
                if self._tokens == self._shard_tokens:
                    self._close_shard()

    def finish(self) -> Split:
        """Close the last file, and return the split, which must have at least one document."""
        with writing(self._directory):
            self._close_shard()
        documents = sum(shard.documents for shard in self._shards)
        return Split(shards=self._shards, tokens=self.tokens, documents=documents)

    def abort(self) -> None:
        """Close and remove the unfinished file, if there is one."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk the rest of the buffer fails again
                self._file.close()
            self._file = None
        # Do this even if no file is stored: an interrupt may come after the file was made.
        self._path(".tmp").unlink(missing_ok=True)

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._path(".tmp").replace(self._path())
        self._shards.append(
            Shard(
                file=self._path().name, tokens=self._tokens, documents=self._documents, sha256=self._sha256.hexdigest()
            )
        )
        self._file, self._tokens, self._documents, self._sha256 = None, 0, 0, hashlib.sha256()

    def _path(self, suffix: str = "") -> Path:
        return self._directory / f"{self._split}-{len(self._shards):05d}.bin{suffix}"


def _write(
    directory: Path, batches: Iterable[EncodedBatch], tokenizer: Tokenizer, settings: Settings, *, of_tokens: bool
) -> tuple[dict[str, Split], Counter[str]]:
    """Write all batches, and return the splits and the counts for the index and the log.

    Raises DataError if the disk is full or a split is empty.
    """
    dtype = np.dtype("uint32" if of_tokens else dtype_name(tokenizer.vocab_size)).newbyteorder("<")
    writers = {
        split: ShardWriter(directory, split, dtype, settings.shard_tokens, tokenizer.end_of_text) for split in SPLITS
    }
    documents: dict[str, int] = dict.fromkeys(SPLITS, 0)
    counts = Counter[str]()
    with contextlib.ExitStack() as unfinished:
        for writer in writers.values():
            unfinished.callback(writer.abort)
        for batch in batches:
            for split, tokens in batch.tokens.items():
                if of_tokens and (largest := int((tokens % UNCOUNTED).max())) >= tokenizer.vocab_size:
                    raise DataError(
                        f"input_ids: token {largest} is outside the vocabulary of {tokenizer.vocab_size:,}; name the "
                        "tokenizer that made them with --tokenizer"
                    )
                writers[split].write(tokens)
                documents[split] += batch.documents[split]
            counts.update(text_bytes=batch.text_bytes, without_text=batch.without_text)
        _check_splits(documents, settings.held_out)
        counts["documents"] = sum(documents.values())
        splits = {split: writer.finish() for split, writer in writers.items()}
    return splits, counts


def _check_splits(documents: dict[str, int], held_out: float) -> None:
    total = sum(documents.values())
    if not total:
        raise DataError("the corpus is empty, because no file has a document with text; give other files")
    if total < len(documents):
        raise DataError(
            f"the corpus is one document, but each of the splits {' and '.join(documents)} needs one; give more (a "
            ".txt file is one document, a .jsonl file has one per line, under the key text)"
        )
    for split, count in documents.items():
        if not count:
            raise DataError(
                f"the split {split!r} is empty: with {held_out:g} of {total:,} document(s) held out, it gets none "
                "(equal documents are in the same split); give more different documents (a .txt file is one) or "
                f"{'raise' if split == 'held_out' else 'lower'} --held-out"
            )


def _with_progress(batches: Iterable[EncodedBatch], total_bytes: int, enabled: bool) -> Iterator[EncodedBatch]:
    """Yield the batches, and show how many bytes of the sources are done, in a bar or in lines."""
    if enabled and sys.stderr.isatty():
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="encoding") as bar:
            for batch in batches:
                yield batch
                bar.update(batch.source_bytes)
        return
    done, last = 0, time.monotonic()
    for batch in batches:
        yield batch
        done += batch.source_bytes
        if enabled and time.monotonic() - last >= _PLAIN_LINE_SECONDS:
            last = time.monotonic()
            encoded = f"{format_bytes(done, 'MB', 0)} of {format_bytes(total_bytes, 'MB', 0)}"
            print(f"encoding: {encoded}", file=sys.stderr, flush=True)


def dtype_name(vocab_size: int) -> Any:
    return "uint16" if vocab_size <= 65535 else "uint32"
