"""The index of a directory that ``sdp prepare`` wrote: its token shards, and their origin."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..engine.errors import DataError, quote
from ..engine.files import write_whole
from .files import HASHING_THREADS, INDEX_FILE, read_index, sha256_of, special_kind

FORMAT = "sdp-token-shards"
VERSION = 1
SPLITS = ("train", "held_out")
SHARDS = re.compile(r".*\.bin|index\.json")  # files in an object store that a new corpus replaces
_DEFAULT = "without --input: of the sources of Python's standard library"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Strict):
    """One ``.bin`` file of raw little-endian token ids.

    ``documents`` counts end-of-text tokens, so a document counts in the file in which it ends.
    """

    file: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.bin$")  # never a path out of the directory
    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    sha256: str


class Split(_Strict):
    """One split of a corpus, "train" or "held_out", with its shards in order.

    ``tokens`` and ``documents`` are sums over the shards. ``tokens`` includes the end-of-text token
    that follows every document.
    """

    shards: list[Shard]
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_sum(self) -> Split:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError("the shards together have another number of tokens than the split")
        return self


class Corpus(_Strict):
    """The corpus that the tokens came from, as the index describes it.

    ``bytes`` is the size of the files, and ``text_bytes`` the size of the texts in them. ``sha256``
    is a hash of the files' hashes, in the order in which the files were read.
    """

    sources: list[str]
    sha256: str
    files: int
    bytes: int
    documents: int
    text_bytes: int


class Index(_Strict):
    """The content of ``index.json``, which describes a directory of prepared data.

    ``settings`` has the arguments of ``sdp prepare`` on which the tokens depend. If
    ``masks_labels`` is true, some tokens have labels that do not count in the loss, and 2**31 is
    added to their ids.
    """

    format: Literal["sdp-token-shards"] = FORMAT
    version: Literal[1] = VERSION
    tokenizer: dict[str, Any]
    vocab_size: int = Field(ge=2)
    end_of_text: int = Field(ge=0)
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, Split] = Field(min_length=1)
    corpus: Corpus
    settings: dict[str, Any]
    masks_labels: bool = False

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Index:
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text {self.end_of_text} is outside the vocabulary of {self.vocab_size}")
        return self

    def save(self, directory: Path) -> None:
        """Write ``index.json`` in one step. Call this last: it marks a directory as complete."""
        write_whole(directory / INDEX_FILE, json.dumps(self.model_dump(), indent=1) + "\n")

    def check_sizes(self, directory: Path) -> None:
        """Raise DataError if any shard is missing or does not have the size in the index."""
        for shard in self._shards():
            self.check_size(directory, shard)

    def check_size(self, directory: Path, shard: Shard) -> None:
        """Raise DataError if this shard is missing or does not have the size in the index."""
        path, expected = directory / shard.file, shard.tokens * self._width
        if (kind := special_kind(path)) is not None:
            raise DataError(f"{path}: this token shard is {kind}; {_again(directory)}")
        if not path.is_file():
            raise DataError(f"{path}: this token shard is missing; {_again(directory)}")
        if (size := path.stat().st_size) != expected:
            raise DataError(f"{path}: {size:,} bytes instead of {expected:,}, damaged or cut off; {_again(directory)}")

    def verify(self, directory: Path) -> None:
        """Read and hash every shard. Raise DataError if a size or sha256 differs from the index."""
        self.check_sizes(directory)
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            digests = pool.map(lambda shard: sha256_of(directory / shard.file), self._shards())
            for shard, digest in zip(self._shards(), digests, strict=True):
                if digest != shard.sha256:
                    pool.shutdown(wait=False, cancel_futures=True)
                    path = directory / shard.file
                    raise DataError(
                        f"{path}: sha256 {digest[:12]}… instead of {shard.sha256[:12]}…, damaged; {_again(directory)}"
                    )

    @property
    def bytes(self) -> int:
        """The size of all shards of all splits, in bytes."""
        return sum(shard.tokens for shard in self._shards()) * self._width

    @property
    def _width(self) -> int:
        return int(self.dtype.removeprefix("uint")) // 8

    def _shards(self) -> list[Shard]:
        return [shard for split in self.splits.values() for shard in split.shards]


def load_index(directory: str | Path) -> Index:
    """Read the index of a prepared directory. Raises DataError if it is missing or damaged."""
    path = Path(directory) / INDEX_FILE
    make = f"make it with: sdp prepare --input FILES --output {directory} ({_DEFAULT})"
    content = read_index(path, f"no prepared data here (no {INDEX_FILE}); {make}", _again(path.parent))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: not an index of token shards (no format {FORMAT!r})")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path}: is of version {quote(content.get('version'))}, but this program reads version {VERSION}; "
            f"{_again(path.parent)}"
        )
    try:
        return Index.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "index"
        raise DataError(f"{path}: {where}: {first['msg']}; {_again(path.parent)}") from error


def _again(directory: Path) -> str:
    return f"prepare it again with: sdp prepare --input FILES --output {directory} --overwrite ({_DEFAULT})"
