"""How DCP writes large tensors: in pieces, because it reads a piece whole, however little of it is wanted.

So whoever reads (a resume on another layout, an export) needs memory for what it keeps and one piece, not for the largest tensor.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

PIECE_BYTES = 8 * 2**20  # reading takes twice that; sharding a 70B model over 512 ranks makes more pieces than this does


class PiecewisePlanner(DefaultSavePlanner):
    """DCP's planner with every chunk cut along its rows, into pieces of at most ``PIECE_BYTES`` (one row, where a row is larger)."""

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
