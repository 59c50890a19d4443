"""Adapts torch.distributed.checkpoint (DCP) to this project's checkpoints.

DCP itself stores the list of a checkpoint's tensors as a pickle, and reading a pickle can run code.
So :class:`MetadataWriter` writes the same list as JSON, to ``metadata.json``. :class:`Chunks` are
parts of tensors, and :class:`PiecewisePlanner` limits their size. Tensor files are DCP's own.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...errors import CheckpointError, first_line
from ...files import write_whole
from ...json_files import read_json_file
from .files import MOST_BYTES, read_state

METADATA = "metadata.json"


class _ExistingDirectories(FileSystem):
    def mkdir(self, path: Any) -> None:
        """Check that the directory exists. torch would make it again, with all parents."""
        if not Path(path).is_dir():
            raise FileNotFoundError(errno.ENOENT, "it was removed while the checkpoint was written", str(path))


class MetadataWriter(FileSystemWriter):
    """Writes tensors as DCP does, but the list of tensors as JSON. The directory must exist."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.fs = _ExistingDirectories()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors.

        Raises:
            OSError: A file cannot be written, for example because the disk is full. torch alone
                would raise an error that hides this cause.
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
    """Build DCP's list of tensors (its metadata) from the content of ``metadata.json``.

    Args:
        content: The decoded JSON.
        files: The names of the checkpoint's files.
        load_id: DCP's name for this load.

    Raises:
        ValueError: A tensor lies in a file that is not in ``files``, or torch has no such dtype.
        KeyError, TypeError, AttributeError: ``content`` is not what :class:`MetadataWriter` writes.
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


class SafeReader(FileSystemReader):
    """Reads a checkpoint for DCP without unpickling.

    The list of tensors is JSON, and DCP reads the tensors with ``torch.load(weights_only=True)``.
    """

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's list of tensors, or raise CheckpointError if it is damaged."""
        if self._metadata is None:
            path = Path(self.path)
            files = read_state(path)["files"]
            try:
                content = read_json_file(path / METADATA, most_bytes=MOST_BYTES)
                self._metadata = build_metadata(content, files, self.load_id)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
                remedy = "resume from an older checkpoint"
                raise CheckpointError(f"{path / METADATA}: damaged ({first_line(error)}); {remedy}") from None
        return self._metadata


class Chunks(torch.Tensor):
    """The pieces of a tensor that this rank has, in the form in which DCP saves and loads them.

    The whole tensor has the shape ``whole``. In it, the piece ``locals[i]`` begins at the indices
    ``offsets[i]``. Nothing can be computed with this object.
    """

    locals: list[torch.Tensor]
    offsets: list[torch.Size]

    @staticmethod
    def __new__(cls, locals: Sequence[torch.Tensor], offsets: Sequence[Sequence[int]], whole: torch.Size) -> Chunks:
        part = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=locals[0].dtype, device=locals[0].device)
        part.locals, part.offsets = list(locals), [torch.Size(offset) for offset in offsets]
        return part

    def joined(self, other: Chunks) -> Chunks:
        """Return the pieces of this object and of ``other``, which belong to the same tensor."""
        return Chunks([*self.locals, *other.locals], [*self.offsets, *other.offsets], self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} cannot be computed on a part of a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        chunks = ", ".join(
            f"{tuple(local.shape)} at {tuple(at)}" for local, at in zip(self.locals, self.offsets, strict=True)
        )
        return f"Chunks({chunks} of {tuple(self.shape)})"

    # DCP's protocol for tensors that are not DTensors (torch.distributed._checkpointable).

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        pieces = zip(self.locals, self.offsets, strict=True)
        return [ChunkStorageMetadata(at, local.shape) for local, at in pieces if local.numel()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.locals[0])
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return next(
            local for local, at in zip(self.locals, self.offsets, strict=True) if at == index.offset and local.numel()
        )


# Reading a piece takes twice its size in memory. If a 70B model is sharded over 512 ranks, most
# shards are smaller than this limit.
PIECE_BYTES = 8 * 2**20


class PiecewisePlanner(DefaultSavePlanner):
    """Plans a save as DCP does, and cuts tensors by rows into pieces of ``PIECE_BYTES`` bytes."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._chunks: dict[MetadataIndex, tuple[WriteItem, int]] = {}
        self.plan = dataclasses.replace(plan, items=[piece for item in plan.items for piece in self._pieces(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index not in self._chunks:
            return super().resolve_data(write_item)
        item, start = self._chunks[write_item.index]
        chunk, data = write_item.tensor_data, super().resolve_data(item)
        assert chunk is not None and isinstance(data, torch.Tensor)
        return data.narrow(0, start, chunk.chunk.sizes[0])

    def _pieces(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        if data is None or not data.chunk.sizes:
            yield item
            return
        offsets, sizes = data.chunk.offsets, data.chunk.sizes
        row_bytes = math.prod(sizes[1:]) * data.properties.dtype.itemsize
        rows = max(1, PIECE_BYTES // max(1, row_bytes))
        if sizes[0] <= rows:
            yield item
            return
        for start in range(0, sizes[0], rows):
            at = torch.Size((offsets[0] + start, *offsets[1:]))
            piece = ChunkStorageMetadata(at, torch.Size((min(rows, sizes[0] - start), *sizes[1:])))
            index = MetadataIndex(item.index.fqn, at)
            self._chunks[index] = item, start
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=dataclasses.replace(data, chunk=piece))


def _cause(error: CheckpointException) -> str:
    return first_line(next(iter(error.failures.values()))[0])


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """Suppress DCP's warning that only one process reads or writes, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
