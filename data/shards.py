"""Token shards as a map-style data set: samples of a fixed length, from one or more directories."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..engine.batch.mixture import Source
from ..engine.batch.positioned_file import PositionedFile
from ..engine.batch.sampler import PathSamples
from ..engine.errors import DataError
from .files import read_at
from .index import Index, load_index
from .sources import IGNORED_LABEL, UNCOUNTED

MOST_OPEN = 256  # open shards; a process often may have only 1,024 open files


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """A map-style data set of token shards: the samples of one split of a prepared directory.

    Sample ``i`` is tokens ``[i × L, (i + 1) × L)`` of the split, with L = ``sequence_length``. It
    may span documents and shards. Tokens after the last whole sample are not read.

    A sample is ``{"input_ids": (L,), "labels": (L,)}``, both int64. A label is the input id at the
    same position, or -100 if it does not count. The model shifts the labels, as Hugging Face's
    models do. With ``document_mask``, ``"documents": (L,)`` has the number of each token's document
    in the sample. An end-of-text token belongs to the document that it ends.

    If the run has paths (``sdp.paths``), ``paths`` says which samples each path reads.

    Raises DataError if a shard is missing or damaged, if the split is too small, or if a token id
    is outside the vocabulary. A shard that is cut off later is found when it is read.
    """

    def __init__(self, directory: str | Path, split: str, sequence_length: int, *, document_mask: bool = False) -> None:
        if sequence_length < 1:
            raise DataError(f"the sequence length must be at least 1, but is {sequence_length}")
        self.directory = Path(directory)
        self.index: Index = load_index(directory)
        if split not in self.index.splits:
            raise DataError(f"{directory}: has no split {split!r}; there are {', '.join(self.index.splits)}")
        self.index.check_sizes(self.directory)
        self.split = split
        self.paths: PathSamples | None = None
        self.sequence_length, self.document_mask = sequence_length, document_mask
        self.vocab_size = self.index.vocab_size
        self.end_of_text = self.index.end_of_text
        self.tokens = self.index.splits[split].tokens
        if self.tokens < sequence_length:
            raise DataError(
                f"{directory}: the split {split!r} has {self.tokens:,} tokens, fewer than one sequence of"
                f" {sequence_length:,}; use a shorter sequence or more text"
            )
        shards = self.index.splits[split].shards
        self._ends = list(itertools.accumulate(shard.tokens for shard in shards))
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._open: dict[int, PositionedFile] = {}  # in the order in which they were opened

    def __len__(self) -> int:
        return self.tokens // self.sequence_length

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        tokens = self._read(item * self.sequence_length, self.sequence_length)
        input_ids = torch.from_numpy(tokens % UNCOUNTED)
        labels = torch.from_numpy(np.where(tokens < UNCOUNTED, tokens, IGNORED_LABEL))
        sample = {"input_ids": input_ids, "labels": labels}
        if self.document_mask:
            ends = (input_ids == self.end_of_text).to(torch.int32)
            sample["documents"] = ends.cumsum(0, dtype=torch.int32) - ends
        return sample

    def read_prefix(self, item: int, count: int) -> np.ndarray:
        """Return the first ``count`` tokens of sample ``item``, as int64."""
        return self._read(item * self.sequence_length, count) % UNCOUNTED

    def verify(self) -> None:
        """Read every shard of every split. Raise DataError if a sha256 differs from the index."""
        self.index.verify(self.directory)

    def _read(self, start: int, count: int) -> np.ndarray:
        """Return ``count`` tokens from position ``start`` of the split, unchanged, as int64."""
        out = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            shard = bisect.bisect_right(self._ends, start + filled)
            offset = start + filled - (self._ends[shard - 1] if shard else 0)
            part = self._read_shard(shard, offset, count - filled).astype(np.int64)
            if (largest := int((part % UNCOUNTED).max())) >= self.vocab_size:
                raise DataError(
                    f"{self._path(shard)}: damaged: token id {largest} near position {offset:,} is outside the"
                    f" vocabulary of {self.vocab_size:,}; check with: sdp prepare --output {self.directory} --verify"
                )
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def _path(self, shard: int) -> Path:
        return self.directory / self.index.splits[self.split].shards[shard].file

    def _read_shard(self, shard: int, offset: int, count: int) -> np.ndarray:
        """Return ``count`` tokens from position ``offset`` of a shard, or fewer at its end."""
        about = self.index.splits[self.split].shards[shard]
        count, width = min(count, about.tokens - offset), self._dtype.itemsize
        file = self._file(shard)
        read = read_at(file, offset * width, count * width)
        if len(read) < count * width:
            self.index.check_size(self.directory, about)
            raise DataError(f"{file.path}: was cut off while it was in use, and is complete now; start the run again")
        return np.frombuffer(read, dtype=self._dtype)

    def _file(self, shard: int) -> PositionedFile:
        # A shard is opened on first use, so that a worker does not open thousands of files.
        file = self._open.get(shard)
        if file is None:
            self.index.check_size(self.directory, self.index.splits[self.split].shards[shard])
            if len(self._open) >= MOST_OPEN:
                del self._open[next(iter(self._open))]
            path = self._path(shard)
            try:
                file = self._open[shard] = PositionedFile(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        return file

    def __getstate__(self) -> dict[str, Any]:
        # Each worker process opens the files itself.
        return {**self.__dict__, "_open": {}}


class MixedTokens(Dataset[dict[str, torch.Tensor]]):
    """A map-style data set of one split of several sources (``data.sources``), one after another.

    The loader mixes the sources by their weights, or reads one source for each path
    (``sdp.paths``). A source is recognised by the hash of its corpus, so a resumed run accepts a
    directory that was moved.

    Args:
        paths: The directories of the sources.
        weights: The share of each source, relative to the other weights.
        split: The split, "train" or "held_out".
        sequence_length: The tokens of a sample.
        document_mask: Whether a sample says to which document each token belongs.

    Raises:
        DataError: A source cannot be read, two sources have the same content, or tokenizers differ.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        weights: Sequence[float],
        split: str,
        sequence_length: int,
        *,
        document_mask: bool = False,
    ) -> None:
        self.parts = [TokenDataset(path, split, sequence_length, document_mask=document_mask) for path in paths]
        _refuse_unlike(self.parts)
        self.sources = tuple(
            Source(name, part.index.corpus.sha256, len(part), weight)
            for name, part, weight in zip(names_of(paths), self.parts, weights, strict=True)
        )
        self.paths: PathSamples | None = None
        self.ends = list(itertools.accumulate(map(len, self.parts)))
        self.index, self.vocab_size = self.parts[0].index, self.parts[0].vocab_size
        self.tokens = sum(part.tokens for part in self.parts)

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        part = bisect.bisect_right(self.ends, item)
        return self.parts[part][item - (self.ends[part - 1] if part else 0)]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Name each source by the last part of its path. If names are equal, use the whole paths."""
    counts = Counter(path.name for path in paths)
    return [path.name if counts[path.name] == 1 else str(path) for path in paths]


def _refuse_unlike(parts: Sequence[TokenDataset]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.index.tokenizer != first.index.tokenizer or part.vocab_size != first.vocab_size:
            raise DataError(
                f"data.sources: {part.directory} was prepared with another tokenizer than {first.directory}; prepare "
                "all sources with the same one, for example --tokenizer hf:DIR"
            )
    seen: dict[str, Path] = {}
    for part in parts:
        key = part.index.corpus.sha256
        if key in seen:
            raise DataError(f"data.sources: {seen[key]} and {part.directory} have the same corpus; name it only once")
        seen[key] = part.directory
