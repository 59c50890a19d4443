"""A rank's part of a tensor as DCP saves and loads it: chunks at offsets in the whole, however it came to be cut.

DTensor states a chunk only along its own mesh, which knows nothing of a tensor-parallel cut made before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Part(torch.Tensor):
    """Stands for a tensor of the ``whole`` shape, of which ``locals`` lie at ``offsets``; nothing can be computed with it."""

    locals: list[torch.Tensor]
    offsets: list[torch.Size]

    @staticmethod
    def __new__(cls, locals: Sequence[torch.Tensor], offsets: Sequence[Sequence[int]], whole: torch.Size) -> Part:
        part = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=locals[0].dtype, device=locals[0].device)
        part.locals, part.offsets = list(locals), [torch.Size(offset) for offset in offsets]
        return part

    def joined(self, other: Part) -> Part:
        """Both parts of one tensor."""
        return Part([*self.locals, *other.locals], [*self.offsets, *other.offsets], self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a part of a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        places = zip(self.locals, self.offsets, strict=True)
        return f"Part({', '.join(f'{tuple(local.shape)} at {tuple(at)}' for local, at in places)} of {tuple(self.shape)})"

    # DCP's protocol for tensors that are not DTensors (torch.distributed._checkpointable).

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        places = zip(self.locals, self.offsets, strict=True)
        return [ChunkStorageMetadata(at, local.shape) for local, at in places if local.numel()]

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
        return next(local for local, at in zip(self.locals, self.offsets, strict=True) if at == index.offset and local.numel())
