"""Read DCP's files without trusting them: its metadata file is a pickle, of which only what DCP itself writes is accepted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_METADATA_FILE = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
}  # fmt: skip


class _DCPUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of this engine holds")


class SafeReader(FileSystemReader):
    """DCP's reader of a directory; raises ``pickle.UnpicklingError`` for metadata that would run code.

    Tensors themselves are read by DCP with ``torch.load(weights_only=True)``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA_FILE).open("rb") as file:
            metadata = _DCPUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no metadata of a checkpoint")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata
