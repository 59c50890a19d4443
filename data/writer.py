"""Writes the tokens of one split into shards of bounded size."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import IO

import numpy as np

from .index import Shard, Split
from .output import writing
from .sources import UNCOUNTED


class ShardWriter:
    """Cuts a stream of tokens into ``SPLIT-NNNNN.bin`` files of at most ``shard_tokens`` tokens.

    A file has its name only once it is complete. ``dtype`` is a little-endian unsigned NumPy type.
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
        """Append ``tokens`` (1-D, with end-of-text tokens). A full shard is followed by a new one.

        Raises DataError if the file cannot be written.
        """
        with writing(self._directory):
            self._write(tokens)

    def finish(self) -> Split:
        """Close the last shard and describe all of them. There must be at least one document."""
        with writing(self._directory):
            self._close_shard()
        documents = sum(shard.documents for shard in self._shards)
        return Split(shards=self._shards, tokens=self.tokens, documents=documents)

    def abort(self) -> None:
        """Close and remove the unfinished shard."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk the rest of the buffer fails again
                self._file.close()
            self._file = None
        # Do this even if no file is stored: an interrupt may come after the file was made.
        self._path(".tmp").unlink(missing_ok=True)

    def _write(self, tokens: np.ndarray) -> None:
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

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._path(".tmp").replace(self._path())
        self._shards.append(
            Shard(
                file=self._path().name,
                tokens=self._tokens,
                documents=self._documents,
                sha256=self._sha256.hexdigest(),
            )
        )
        self._file, self._tokens, self._documents, self._sha256 = None, 0, 0, hashlib.sha256()

    def _path(self, suffix: str = "") -> Path:
        return self._directory / f"{self._split}-{len(self._shards):05d}.bin{suffix}"
