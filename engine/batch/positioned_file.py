"""Read a file at any position, without a memory map."""

from __future__ import annotations

import os
import weakref
from pathlib import Path


class PositionedFile:
    """A file that is read at any position, also by worker processes that inherit it.

    If a file is cut off during the run, a memory map would end the process by SIGBUS, which does
    not name the file. Here, a read returns fewer bytes. A removed file can still be read.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The flag matters only if a FIFO has replaced the file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    def size(self) -> int:
        """The bytes that the file has now."""
        return os.fstat(self._descriptor).st_size

    def read(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes, or fewer at the end of the file. Raises OSError."""
        parts: list[bytes] = []
        # The kernel returns at most 2 GiB at a time.
        while count and (part := os.pread(self._descriptor, count, position)):
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
