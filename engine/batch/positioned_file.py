"""Reads a file at any position, without a memory map."""

from __future__ import annotations

import os
import weakref
from pathlib import Path


class PositionedFile:
    """An open file that can be read at any position, also by worker processes.

    It is used instead of a memory map. If a file becomes shorter during the run, a memory map ends
    the process by SIGBUS without a message, while :meth:`read` returns fewer bytes.

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
        """The present size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes from ``position`` on, or fewer at the end of the file."""
        parts: list[bytes] = []
        # The kernel returns at most 2 GiB at a time.
        while count and (part := os.pread(self._descriptor, count, position)):
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
