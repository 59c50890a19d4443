"""Read a file at any position, without a memory map."""

from __future__ import annotations

import os
import weakref
from pathlib import Path


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

    @property
    def size(self) -> int:
        """The bytes that the file has now."""
        return os.fstat(self._descriptor).st_size

    def read(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes, or fewer if the file ends before. Raises OSError."""
        parts: list[bytes] = []
        # The kernel returns at most 2 GiB at a time.
        while count and (part := os.pread(self._descriptor, count, position)):
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
