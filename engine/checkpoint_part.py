"""A rank's part of a tensor as DCP saves and loads it: one chunk at an offset in the whole, however it came to be cut.

DTensor states a chunk only along its own mesh, which knows nothing of a tensor-parallel cut made before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Part(torch.Tensor):
    """Stands for a tensor of the ``whole`` shape, of which ``local`` lies at ``offset``; nothing can be computed with it."""

    local: torch.Tensor
    offset: torch.Size

    @staticmethod
    def __new__(cls, local: torch.Tensor, offset: Sequence[int], whole: torch.Size) -> Part:
        part = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=local.dtype, device=local.device)
        part.local, part.offset = local, torch.Size(offset)
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a part of a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Part({tuple(self.local.shape)} at {tuple(self.offset)} of {tuple(self.shape)})"

    # DCP's protocol for tensors that are not DTensors (torch.distributed._checkpointable).

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offset, self.local.shape)] if self.local.numel() else []

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset == self.offset
        return self.local
