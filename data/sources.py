"""Documents out of .txt, .jsonl (plain, .gz, .zst) and .parquet files; errors name the file and the line or row."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from ..engine.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
HASHING_THREADS = 4
_READ_BYTES = 2**17


@dataclass(frozen=True)
class Document:
    """One text of the corpus; ``""`` for a text that is empty or null, which no split gets.

    split_key: what decides whether it is held out; None: the text itself, so that equal texts stay together.
    source_bytes: bytes of the source that were read for it, for the progress bar.
    """

    text: str
    source_bytes: int
    split_key: str | None = None


@dataclass(frozen=True)
class Source:
    """One file (or other piece) of a corpus: its name, its size in bytes and the sha256 of its bytes."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class FileCorpus:
    """The user's files, in the order in which they are read."""

    paths: tuple[Path, ...]
    text_column: str

    def sources(self) -> list[Source]:
        """Name, size and hash of every file; reads all of them once."""
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            return list(pool.map(_source_of, self.paths))

    def documents(self, piece: int | None = None) -> Iterator[Document]:
        """All documents in order, or those of the file with index ``piece``."""
        paths = self.paths if piece is None else (self.paths[piece],)
        for path in paths:
            yield from read_documents(path, self.text_column)


def expand_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files that match the glob patterns (``**`` descends), sorted, each once; raises DataError where none does."""
    if not patterns:
        raise DataError("no input is named: give at least one file or pattern")
    found: dict[Path, Path] = {}
    for pattern in patterns:
        matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))  # noqa: PTH207 absolute patterns
        if not matches:
            raise DataError(f"no file matches {pattern!r}")
        for match in map(Path, matches):
            if match.is_file():
                _suffix(match)
                found.setdefault(match.resolve(), match)
            elif len(matches) == 1:
                raise DataError(f"{match} is a directory: give a pattern of files, such as {match}/**/*.jsonl")
    if not found:
        raise DataError(f"no file matches {', '.join(map(repr, patterns))}, only directories do")
    return tuple(sorted(found.values()))


def read_documents(path: Path, text_column: str = "text") -> Iterator[Document]:
    """The documents of one file, chosen by its suffix; raises DataError naming file and line (or row)."""
    suffix = _suffix(path)
    try:
        if suffix == ".txt":
            documents = _read_text(path)
        elif suffix == ".parquet":
            documents = _read_parquet(path, text_column)
        else:
            documents = _read_json_lines(path, text_column)
        yield from documents
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _suffix(path: Path) -> str:
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise DataError(f"{path}: this kind of file is not read; supported are {', '.join(SUFFIXES)}")


def _source_of(path: Path) -> Source:
    digest = sha256_of(path)
    return Source(str(path), path.stat().st_size, digest)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal; raises DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _read_text(path: Path) -> Iterator[Document]:
    data = path.read_bytes()
    try:
        yield Document(data.decode("utf-8-sig"), len(data))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error


def _read_json_lines(path: Path, column: str) -> Iterator[Document]:
    number = 0
    with path.open("rb") as raw:
        position = 0
        try:
            for number, line in enumerate(_decompressed(path, raw), start=1):
                if not line.strip():
                    continue
                # The position on disk: behind a decompressor it jumps by blocks, which a progress bar can bear.
                consumed, position = raw.tell() - position, raw.tell()
                yield Document(_text_of_line(line, column, f"{path}, line {number}"), consumed)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise DataError(
                f"{path}, after line {number}: damaged or cut off ({error}); fetch the file again"
            ) from error


def _decompressed(path: Path, raw: io.BufferedReader) -> Iterator[bytes]:
    suffix = _suffix(path)
    if suffix == ".jsonl":
        yield from raw
        return
    if not raw.peek(1):  # compressed nothing has a header
        raise EOFError("the file is empty")
    yield from gzip.GzipFile(fileobj=raw) if suffix == ".jsonl.gz" else io.BufferedReader(_ZstdFrames(raw))


class _ZstdFrames(io.RawIOBase):
    """The content of all frames of ``raw``; EOFError where the last one does not end, which zstandard's own readers let pass."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._pending:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
            data = data or self._raw.read(_READ_BYTES)
            if not data:
                if self._begun:
                    raise EOFError("the last Zstandard frame does not end")
                return 0
            self._begun = True
            self._pending = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count


def _text_of_line(line: bytes, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets as deep
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is expected, this is a {type(row).__name__}")
    if column not in row:
        raise DataError(_missing_column(where, column, list(row)))
    if row[column] is None:
        return ""
    if not isinstance(row[column], str):
        raise DataError(f"{where}: {column!r} must be a string, it is {type(row[column]).__name__}")
    # JSON can spell half of a surrogate pair, which no encoding of text can hold.
    return row[column].encode("utf-8", "replace").decode("utf-8")


def _missing_column(where: str, column: str, columns: list[str]) -> str:
    return f"{where}: no column {column!r} (there are: {', '.join(columns) or 'none'}); choose one with --text-column"


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    import pyarrow  # here, because loading it takes longer than preparing a small corpus without it
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        schema = file.schema_arrow
        if (count := schema.names.count(column)) > 1:
            raise DataError(f"{path}: {count} columns are named {column!r}; rename one of them")
        if not count:
            raise DataError(_missing_column(str(path), column, schema.names))
        kind = schema.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null())
        if kind not in strings:
            raise DataError(f"{path}: column {column!r} must hold strings, it holds {kind}")
        bytes_per_row = path.stat().st_size / max(file.metadata.num_rows, 1)
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield Document(text or "", _share(bytes_per_row, row))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); fetch the file again") from error


def _share(bytes_per_row: float, row: int) -> int:
    return int(row * bytes_per_row) - int((row - 1) * bytes_per_row)
