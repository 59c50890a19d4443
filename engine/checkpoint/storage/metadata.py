"""The list of a checkpoint's tensors, which says where each tensor lies in the files.

DCP itself stores this list as a pickle, and reading a pickle can run code. So ``MetadataWriter``
writes the same list as JSON, to ``metadata.json``. Tensor files are DCP's own.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Mapping
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

from ...files import write_whole

METADATA = "metadata.json"


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
        write_whole(Path(self.path) / METADATA, json.dumps({"tensors": _encode(metadata, storage_infos)}))


def _encode(metadata: Metadata, storage_infos: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{key!r} is not a tensor; a checkpoint holds only tensors")
        chunks = []
        for chunk in tensor.chunks:
            stored = storage_infos[MetadataIndex(key, chunk.offsets)]
            chunks.append({
                "offsets": list(chunk.offsets), "sizes": list(chunk.sizes),
                "file": stored.relative_path, "offset": stored.offset, "length": stored.length,
            })  # fmt: skip
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return tensors


def build_metadata(content: Any, files: Collection[str], load_id: str) -> Metadata:
    """Build DCP's metadata from the content of ``metadata.json``.

    Args:
        content: The decoded JSON.
        files: The names of the checkpoint's files.
        load_id: DCP's name for this load.

    Raises:
        ValueError: A tensor lies in another file, or its dtype is none of torch.
        KeyError, TypeError, AttributeError: It is not what :class:`MetadataWriter` writes.
    """
    entries: dict[str, Any] = {}
    storage_infos: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in content["tensors"].items():
        chunks = []
        for chunk in tensor["chunks"]:
            if chunk["file"] not in files:
                raise ValueError(f"{key!r} is said to be in {chunk['file']!r}, which is not a file of this checkpoint")
            chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])))
            index = MetadataIndex(key, chunks[-1].offsets)
            storage_infos[index] = _StorageInfo(chunk["file"], chunk["offset"], chunk["length"])
        dtype = vars(torch).get(tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"the dtype of {key!r} is {tensor['dtype']!r}, which torch does not have")
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor["size"]), chunks)
    return Metadata(entries, storage_data=storage_infos, storage_meta=StorageMeta(load_id=load_id))
