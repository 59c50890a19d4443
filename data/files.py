"""Helpers for files of a corpus or of prepared data: kinds of files, hashes, and JSON indexes."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any

from ..engine.batch.positioned_file import PositionedFile
from ..engine.errors import DataError
from ..engine.json_files import read_json_file

INDEX_FILE = "index.json"
HASHING_THREADS = 4

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special_kind(path: Path) -> str | None:
    """Name the kind of ``path``, such as "a FIFO". Returns None for a regular file or no file.

    A link counts as the file that it points to. A link to nothing is "a dangling link to …".
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return f"a dangling link to {path.readlink()}" if path.is_symlink() else None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def require_regular(path: Path, remedy: str) -> None:
    """Raise DataError if ``path`` exists but is not a regular file. Opening a FIFO would hang.

    The message ends with ``remedy``.
    """
    if (kind := special_kind(path)) is not None:
        raise DataError(f"{path}: is not a regular file but {kind}; {remedy}")


def read_index(path: Path, missing: str, again: str) -> Any:
    """Read a JSON file that describes prepared data.

    Raises DataError, whose message ends with advice: ``missing`` if there is no such file,
    ``again`` if it cannot be read.
    """
    require_regular(path, again)
    try:
        return read_json_file(path)
    except FileNotFoundError:
        raise DataError(f"{path.parent}: {missing}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {again}") from error


def read_at(file: PositionedFile, position: int, count: int) -> bytes:
    """Read ``count`` bytes of ``file``, or fewer if the file ends before. Raises DataError."""
    try:
        return file.read(position, count)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror}") from None


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
