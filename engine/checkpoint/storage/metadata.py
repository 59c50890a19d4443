"""The list of a checkpoint's tensors, which says where each tensor lies in the files.

DCP itself stores this list as a pickle, and reading a pickle can run code. So ``MetadataWriter``
writes the same list as JSON, to ``metadata.json``. Every value is checked when it is read. Tensor
files are DCP's own.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import write_durably

METADATA = "metadata.json"
TENSOR_FILES = ".distcp"

_CHUNK = ("offsets", "sizes", "file", "offset", "length")
_TOO_LARGE = 2**63
_MOST_DIMS = 64


class _ExistingDirectories(FileSystem):
    def mkdir(self, path: Any) -> None:
        """Check that the directory exists. torch would make it again, with all parents."""
        if not Path(path).is_dir():
            raise FileNotFoundError(errno.ENOENT, "it was removed while the checkpoint was written", str(path))


class MetadataWriter(FileSystemWriter):
    """DCP's writer of a directory, which must exist. It writes the metadata as JSON."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.fs = _ExistingDirectories()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors.

        Raises:
            OSError: The disk is full, for example. torch itself reports this as "unexpected pos".
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        storage_infos = {result.index: result.storage_data for of_rank in results for result in of_rank}
        write_durably(Path(self.path) / METADATA, json.dumps({"tensors": _encode(metadata, storage_infos)}))


def _encode(metadata: Metadata, storage_infos: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{key!r} is not a tensor; a checkpoint holds only tensors")
        chunks = []
        for chunk in tensor.chunks:
            stored = storage_infos[MetadataIndex(key, chunk.offsets)]
            values = (list(chunk.offsets), list(chunk.sizes), stored.relative_path, stored.offset, stored.length)
            chunks.append(dict(zip(_CHUNK, values, strict=True)))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return tensors


def build_metadata(content: Any, file_sizes: Mapping[str, int], load_id: str) -> Metadata:
    """Build DCP's metadata from the content of ``metadata.json``. Every value is checked first.

    Args:
        content: The decoded JSON.
        file_sizes: The checkpoint's files, with their sizes in bytes.
        load_id: DCP's name for this load.

    Raises:
        ValueError: A value is wrong. The text says which one.
    """
    tensors = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(tensors, dict):
        raise ValueError("it does not list tensors")
    entries: dict[str, Any] = {}
    storage_infos: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, dict) or value.keys() != {"dtype", "size", "chunks"}:
            raise ValueError(f"the entry of {key!r} does not describe a tensor")
        size = _shape(value["size"], f"the size of {key!r}")
        chunks: list[ChunkStorageMetadata] = []
        if not isinstance(value["chunks"], list):
            raise ValueError(f"the chunks of {key!r} are not a list")
        for chunk in value["chunks"]:
            chunks.append(_chunk(key, size, chunk))
            index = MetadataIndex(key, chunks[-1].offsets)
            if index in storage_infos:
                raise ValueError(f"{key!r} has two chunks at {tuple(chunks[-1].offsets)}")
            storage_infos[index] = _storage_info(key, chunk, file_sizes)
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the chunks of {key!r} do not add up to its size")
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=_dtype(key, value["dtype"])), size, chunks)
    return Metadata(entries, storage_data=storage_infos, storage_meta=StorageMeta(load_id=load_id))


def _chunk(key: str, size: torch.Size, chunk: Any) -> ChunkStorageMetadata:
    if not isinstance(chunk, dict) or chunk.keys() != set(_CHUNK):
        raise ValueError(f"a chunk of {key!r} is not described by {', '.join(_CHUNK)}")
    offsets = _shape(chunk["offsets"], f"the offsets of a chunk of {key!r}")
    sizes = _shape(chunk["sizes"], f"the sizes of a chunk of {key!r}")
    if not len(offsets) == len(sizes) == len(size):
        raise ValueError(f"a chunk of {key!r} does not have as many dimensions as the tensor")
    if any(start + length > whole for start, length, whole in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a chunk of {key!r} reaches beyond the tensor")
    return ChunkStorageMetadata(offsets, sizes)


def _storage_info(key: str, chunk: Mapping[str, Any], file_sizes: Mapping[str, int]) -> _StorageInfo:
    file, offset, length = chunk["file"], chunk["offset"], chunk["length"]
    if not isinstance(file, str) or not file.endswith(TENSOR_FILES) or file not in file_sizes:
        raise ValueError(f"{key!r} is said to be in {file!r}, which is not a tensor file of this checkpoint")
    if not _is_count(offset) or not _is_count(length) or offset + length > file_sizes[file]:
        raise ValueError(f"{key!r} is said to be at bytes that {file} does not have")
    return _StorageInfo(file, offset, length)


def _shape(value: Any, what: str) -> torch.Size:
    is_short = isinstance(value, (list, tuple)) and len(value) <= _MOST_DIMS
    if not is_short or not all(map(_is_count, value)) or math.prod(value) >= _TOO_LARGE:
        raise ValueError(f"{what} is not a list of sizes")
    return torch.Size(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _TOO_LARGE


def _dtype(key: str, name: Any) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"the dtype of {key!r} is {name!r}, which torch does not have")
    return dtype


def dtype_named(name: Any) -> torch.dtype | None:
    """Return ``torch.NAME`` if it is a dtype, else None. Nothing is imported to find out."""
    found = vars(torch).get(name) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None
