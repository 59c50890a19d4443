"""Reads documents from text, JSON lines (plain, .gz, .zst), .csv, .parquet and .arrow files.

Errors name the file and the line or row. Memory holds about two copies of a document at most, and
one copy after it is read. For .parquet, it holds three copies of a page, and then two.
"""

from __future__ import annotations

import csv
import functools
import glob
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from ..engine.environment.detect import exported
from ..engine.errors import DataError, quote, shorten
from .files import HASHING_THREADS, sha256_of, special_kind

TEXT_SUFFIXES = (".txt", ".md", ".py")
CSV, PARQUET, ARROW = ".csv", ".parquet", ".arrow"
SUFFIXES = (
    *TEXT_SUFFIXES,
    *(f".{name}{packed}" for name in ("jsonl", "ndjson", "json") for packed in ("", ".gz", ".zst")),
    CSV,
    PARQUET,
    ARROW,
)
MAX_DOCUMENT_BYTES = 2**30
UNCOUNTED = 2**31  # added to a token whose label does not count
IGNORED_LABEL = -100  # torch's and Hugging Face's ignore_index
_ONE_OBJECT = "give one JSON object per line"
_READ_BYTES = 2**17
_ZSTANDARD_BYTES = 2**7
_PARQUET_BATCH_BYTES = 2**26
_PARQUET_BATCH_ROWS = 1024
_FREES_AT_ONCE = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # other allocators keep what was freed for a while


@dataclass(frozen=True)
class Document:
    """One document of a corpus: a text, or token ids that another tool made.

    Attributes:
        text: The text. A text that is null in the file is ``""``.
        source_bytes: The bytes of the file that were read for this document, for the progress bar.
        split_key: The text whose hash decides whether the document is held out. If None, the
            document's own text decides, so that equal texts are in the same split.
        tokens: The token ids (uint32), if the file has tokens instead of text. ``UNCOUNTED`` is
            added to tokens whose labels do not count.
    """

    text: str
    source_bytes: int
    split_key: str | None = None
    tokens: np.ndarray | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the document has neither text nor tokens. Then it goes into no split."""
        return not self.text and self.tokens is None


@dataclass(frozen=True)
class Source:
    """One file of a corpus: its name, its size in bytes and its sha256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FileCorpus:
    """A corpus of the user's files. ``paths`` has them in the order in which they are read."""

    paths: tuple[Path, ...]
    text_column: str
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    def sources(self) -> list[Source]:
        """Return name, size in bytes and sha256 of every file. This reads each file once."""
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            return list(pool.map(_describe, self.paths))

    def documents(self, piece: int | None = None) -> Iterator[Document]:
        """Yield all documents in order, or only those of the file with the index ``piece``."""
        paths = self.paths if piece is None else (self.paths[piece],)
        for path in paths:
            yield from read_documents(path, self.text_column, self.max_document_bytes)


def expand_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """List the files that the user's inputs name, sorted, each file once.

    An input is a file, a folder or a glob pattern, in which ``**`` stands for any number of
    folders. A folder means all files of supported kinds in it and in its subfolders, except hidden
    files. An input that is the name of an existing file or folder is not read as a pattern.

    Raises DataError if a pattern matches nothing, or something that is neither a file of a
    supported kind nor a directory.
    """
    if not patterns:
        raise DataError("no input is named; give at least one file or pattern")
    found: dict[Path, Path] = {}
    for pattern in patterns:
        if "\0" in pattern:
            raise DataError(f"no file matches {quote(pattern)}, which has the character NUL")
        given = Path(pattern).expanduser()
        if given.is_dir():
            matches = _without_facts([path for path in sorted(given.rglob("*")) if _is_of_a_corpus(path, given)])
            if not matches:
                raise DataError(f"{given}: no file of a supported kind in this folder ({', '.join(SUFFIXES)})")
        elif os.path.lexists(given):
            matches = [given]
        else:
            folder = next(parent for parent in given.parents if parent.is_dir())  # its name is no pattern
            below = glob.glob(str(given.relative_to(folder)), root_dir=folder, recursive=True)  # noqa: PTH207 "**"
            matches = sorted(folder / name for name in below)
        if not matches:
            raise DataError(f"no file matches {quote(pattern)}")
        for match in matches:
            if match.is_dir():
                continue
            if (kind := special_kind(match)) is not None:
                raise DataError(f"{match}: is {kind}; give regular files as input")
            _suffix(match)
            found.setdefault(match.resolve(), match)
    if not found:
        raise DataError(f"no file matches {', '.join(map(repr, patterns))}, only directories do")
    return tuple(sorted(found.values()))


def _is_of_a_corpus(path: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not is_hidden and path.name.lower().endswith(SUFFIXES) and path.is_file()


def _without_facts(paths: list[Path]) -> list[Path]:
    """Leave out the .json files that ``save_to_disk`` of Hugging Face's ``datasets`` adds.

    Raises DataError if it saved several splits: they are not mixed.
    """
    arrow = sorted({path.parent for path in paths if path.suffix == ARROW})
    for folder in (path.parent for path in paths if path.name == "dataset_dict.json"):
        splits = [split for split in arrow if split.parent == folder]
        if len(splits) > 1:
            raise DataError(f"{folder}: holds several splits; name the splits to read: {' '.join(map(str, splits))}")
    facts = {folder / name for folder in arrow for name in ("dataset_info.json", "state.json")}
    facts |= {folder.parent / "dataset_dict.json" for folder in arrow}
    return [path for path in paths if path not in facts]


def read_documents(
    path: Path, text_column: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Document]:
    """Yield the documents of one file. The suffix of the file's name decides how it is read.

    ``max_document_bytes`` limits the size of a document: a text file, a line of JSON, or a text in
    a table. Raises DataError, whose message has the file and the line or row.
    """
    suffix = _suffix(path)
    try:
        if suffix in TEXT_SUFFIXES:
            yield from _read_text(path, max_document_bytes)
        else:
            read = {PARQUET: _read_parquet, ARROW: _read_arrow, CSV: _read_csv}.get(suffix, _read_json_lines)
            yield from read(path, text_column, max_document_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _suffix(path: Path) -> str:
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise DataError(f"{path}: files of this kind cannot be read; supported are {', '.join(SUFFIXES)}")


def _describe(path: Path) -> Source:
    digest = sha256_of(path)
    return Source(str(path), path.stat().st_size, digest)


def _too_long(where: str, limit: int) -> DataError:
    return DataError(f"{where}: a document has more than {limit:,} bytes; divide it, or raise --max-document-bytes")


def _read_text(path: Path, limit: int) -> Iterator[Document]:
    if path.stat().st_size > limit:
        raise _too_long(str(path), limit)
    data = path.read_bytes()
    size = len(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    del data  # else it would stay in memory as long as the document does
    yield Document(text, size)


def _read_json_lines(path: Path, column: str, limit: int) -> Iterator[Document]:
    number = 0
    size, step = path.stat().st_size, _READ_BYTES if _suffix(path).endswith(".zst") else 1
    with path.open("rb") as raw:
        position = 0
        try:
            for line in _lines(_decompressed(path, raw), limit):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > limit:
                    raise _too_long(where, limit)
                if not line.strip():
                    continue
                # Behind a decompressor the position jumps. Positions in .zst files are rounded up,
                # since the sample that a tokenizer is trained on depends on them.
                reached = min(-(-raw.tell() // step) * step, size)
                consumed, position = reached - position, reached
                content = _content_of_line(line, column, where)
                yield (
                    Document(content, consumed) if isinstance(content, str) else Document("", consumed, tokens=content)
                )
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise DataError(
                f"{path}, after line {number}: damaged or cut off ({error}); fetch the file again"
            ) from error


def _decompressed(path: Path, raw: io.BufferedReader) -> Iterator[bytes]:
    """Read the file's content in small pieces.

    A piece ends at the end of a line at the latest, except in .zst files.
    """
    suffix = _suffix(path)
    # An empty text has a header when it is compressed.
    if suffix.endswith((".gz", ".zst")) and not raw.peek(1):
        raise EOFError("the file is empty")
    if suffix.endswith(".zst"):
        yield from decompress_frames(raw)
        return
    content: Any = gzip.GzipFile(fileobj=raw) if suffix.endswith(".gz") else raw
    while data := content.readline(_READ_BYTES):
        yield data


def decompress_frames(raw: io.BufferedReader) -> Iterator[bytes]:
    """Decompress all Zstandard frames of ``raw``, and yield the content in small pieces.

    Frames that need a window of more than 128 MiB are refused with a ZstdError. Raises EOFError if
    the last frame is cut off, which the library's own readers accept silently.
    """
    frame = None
    while data := raw.read(_ZSTANDARD_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
            if content := frame.decompress(data):
                yield content
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the last Zstandard frame does not end")


def _lines(pieces: Iterator[bytes], limit: int) -> Iterator[bytearray]:
    """Read the lines of a file. The start of a line longer than ``limit`` is yielded at once.

    A line is a bytearray so that the consumer can free its memory with ``clear()``.
    """
    line = bytearray()
    for piece in pieces:
        start = 0
        while start < len(piece):
            end = piece.find(b"\n", start) + 1 or len(piece)
            line += piece[start:end]
            if line.endswith(b"\n") or len(line) > limit:
                yield line
                line = bytearray()
            start = end
    if line:
        yield line


def _content_of_line(line: bytearray, column: str, where: str) -> str | np.ndarray:
    """Return the text of a line, or its token ids with the marks of those that do not count."""
    try:
        decoded = line.decode(json.detect_encoding(line), "surrogatepass")  # as json.loads does
        line.clear()  # from here on the text is in memory twice instead of three times
        row = json.loads(decoded)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not text in UTF-8 (byte {error.start}); convert the file to UTF-8") from error
    # A number with thousands of digits and thousands of nested brackets also fail here.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); {_ONE_OBJECT}") from error
    del decoded
    if not isinstance(row, dict):
        problem = f"a JSON object is expected, this is a {type(row).__name__}"
        raise DataError(f"{where}: {problem}; {_ONE_OBJECT} (jq -c '.[]' makes lines of a list)")
    if "input_ids" in row and ("labels" in row or column not in row):
        return _marked_tokens(row, where)
    if column not in row:
        raise DataError(_missing_column(where, column, list(row)))
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: {quote(column)} must be a string, but is {type(text).__name__}")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which UTF-8 cannot
        return text.encode("utf-8", "replace").decode()
    return text


def _marked_tokens(row: dict[str, Any], where: str) -> np.ndarray:
    """Return a line's ``input_ids``, with marks on those whose ``labels`` are -100.

    The first token is marked too, because no earlier token predicts it.
    """
    try:
        ids, labels = (np.asarray(row.get(key, row["input_ids"])) for key in ("input_ids", "labels"))
    except ValueError:  # lists of unequal length in the list
        raise DataError(f"{where}: 'input_ids' and 'labels' must be lists of integers") from None
    if ids.dtype.kind != "i" or ids.ndim != 1 or ids.min() < 0 or ids.max() >= UNCOUNTED:
        raise DataError(f"{where}: 'input_ids' must be a list of one or more token ids, which are integers ≥ 0")
    if labels.dtype.kind != "i" or labels.shape != ids.shape:
        raise DataError(f"{where}: 'labels' must be a list of integers, as long as 'input_ids'")
    mask = row.get("attention_mask") or [1]
    if not isinstance(mask, list) or any(entry not in (1, True) for entry in mask):
        raise DataError(
            f"{where}: 'attention_mask' hides some of 'input_ids', or is not a list of ones; leave hidden "
            "tokens out, because sequences are not padded"
        )
    wrong = np.flatnonzero((labels != ids) & (labels != IGNORED_LABEL))
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{where}: label {at} is {labels[at]}, but token {at} is {ids[at]}; a label is the token at the same "
            f"position, or {IGNORED_LABEL} if it does not count (the model itself shifts the labels)"
        )
    uncounted = labels == IGNORED_LABEL
    uncounted[0] = True
    return ids.astype(np.uint32) + uncounted.astype(np.uint32) * np.uint32(UNCOUNTED)


def _missing_column(where: str, column: str, columns: list[str]) -> str:
    return (
        f"{where}: no column {quote(column)} (there are: {shorten(', '.join(columns) or 'none', 1000)}); choose one "
        "with --text-column"
    )


def _read_csv(path: Path, column: str, limit: int) -> Iterator[Document]:
    csv.field_size_limit(min(limit, sys.maxsize))
    consumed = 0

    def lines(raw: io.BufferedReader) -> Iterator[str]:
        nonlocal consumed
        for number, line in enumerate(raw, 1):
            consumed += len(line)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not text in UTF-8; convert the file to UTF-8") from error

    with path.open("rb") as raw:
        rows = csv.reader(lines(raw), strict=True)
        try:
            names = next(rows, [])
            _check_name(path, names, column)
            at = names.index(column)
            for row in rows:
                if row and len(row) != len(names):
                    raise DataError(
                        f"{path}, line {rows.line_num}: has {len(row)} columns, but the first line has {len(names)}; "
                        "repair the file"
                    )
                size, consumed = consumed, 0
                yield Document(row[at] if row else "", size)
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_num}: not readable as CSV ({error})") from error


def _read_parquet(path: Path, column: str, limit: int) -> Iterator[Document]:
    with exported(_FREES_AT_ONCE):  # here, because loading takes longer than preparing a small corpus without it
        import pyarrow
        import pyarrow.parquet

    try:
        # pyarrow must not read ahead: besides the texts, a page is then in memory at most twice.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            _check_column(path, file.schema_arrow, column)
            yield from _texts(path, _parquet_arrays(file, column), limit, file.metadata.num_rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); fetch the file again") from error


def _parquet_arrays(file: Any, column: str) -> Iterator[Any]:
    """Read a column in arrays that stay small even if one text fills a row group."""
    import pyarrow

    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        chunks = map(group.column, range(group.num_columns))
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        rows = max(1, min(_PARQUET_BATCH_ROWS, _PARQUET_BATCH_BYTES // max(size, 1)))
        read = functools.partial(file.iter_batches, rows, row_groups=[index], columns=[column], use_threads=False)
        batches, done = read(), 0
        while (batch := next(batches, None)) is not None:
            array = batch.column(0).cast(pyarrow.large_string())
            del batch
            done += len(array)
            if rows == 1 and 4 * array.nbytes > size:
                # The reader keeps the page or dictionary that has this text. So it is closed
                # before the text is copied, and the rows after it are read by another one.
                batches = itertools.islice(read(), done, None) if done < group.num_rows else iter(())
            yield array
            del array  # else it would stay in memory while the next one is read


def _read_arrow(path: Path, column: str, limit: int) -> Iterator[Document]:
    """Read a file of a folder that ``save_to_disk`` of Hugging Face's ``datasets`` wrote."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
            _check_column(path, stream.schema, column)
            arrays = (batch.column(column).cast(pyarrow.large_string()) for batch in stream)
            yield from _texts(path, arrays, limit)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Arrow stream ({error}); fetch the file again") from error


def _check_name(path: Path, names: list[str], column: str) -> None:
    if not (count := names.count(column)):
        raise DataError(_missing_column(str(path), column, names))
    if count > 1:
        raise DataError(f"{path}: {count} columns are named {quote(column)}; rename one of them")


def _check_column(path: Path, schema: Any, column: str) -> None:
    """Raise DataError unless there is one ``column``, of strings."""
    import pyarrow

    _check_name(path, schema.names, column)
    kind = schema.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()):
        raise DataError(f"{path}: column {quote(column)} must contain strings, but contains {kind}")


def _texts(path: Path, arrays: Iterator[Any], limit: int, rows: int | None = None) -> Iterator[Document]:
    """Yield a document for each text in ``arrays``, which are of the type large_string.

    For the progress bar, each of ``rows`` counts for an equal part of the file, or if ``rows`` is
    None, for the bytes of its text. A text is copied only once; ``as_py`` would copy it twice.
    """
    bytes_per_row = rows and path.stat().st_size / rows
    row = 0
    for array in arrays:
        array = array.fill_null("") if array.null_count else array
        _, offsets, content = array.buffers()
        content = memoryview(content or b"")
        for start, end in itertools.pairwise(np.frombuffer(offsets or b"", np.int64)[array.offset :][: len(array) + 1]):
            row += 1
            if end - start > limit:
                raise _too_long(f"{path}, row {row}", limit)
            share = int(row * bytes_per_row) - int((row - 1) * bytes_per_row) if bytes_per_row else int(end - start)
            yield Document(str(content[start:end], "utf-8"), share)
        del array, offsets, content  # else they would stay in memory while the next ones are read
