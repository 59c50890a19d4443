"""Files of a corpus or of prepared data: their kinds, their hashes and the name of the index."""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from pathlib import Path

from ...engine.errors import DataError

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
    """Name the kind of ``path``, such as "a FIFO", or return None for a regular or missing file.

    A link counts as the file that it points to. A link to nothing is "a dangling link".
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return f"a dangling link to {path.readlink()}" if path.is_symlink() else None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def require_regular(path: Path, remedy: str) -> None:
    """Raise DataError if ``path`` exists but is not a regular file. Opening a FIFO would hang."""
    if (kind := special_kind(path)) is not None:
        raise DataError(f"{path}: is not a regular file but {kind}; {remedy}")


class PositionedFile:
    """A file that is read at any position, also by worker processes that inherit it.

    A memory map of a file that is cut off during the run would end the process by SIGBUS, which
    names no file. Here the read is short, on every launcher. A removed file can still be read.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The flag matters only if somebody puts a FIFO in place of the file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes, or fewer if the file ends before. Raises DataError."""
        parts: list[bytes] = []
        try:
            # The kernel returns at most 2 GiB at a time.
            while count and (part := os.pread(self._descriptor, count, position)):
                parts.append(part)
                position, count = position + len(part), count - len(part)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
