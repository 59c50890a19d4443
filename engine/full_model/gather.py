"""Bring tensors of the full model together from the groups that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.mesh import Coordinates
from ..distributed.process_groups import Communicators
from ..distributed.tensor_collectives import TensorRanks
from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo


class Rank(Protocol):
    """What these functions need to know of a backend."""

    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    rank: int
    at: Coordinates
    communicators: Communicators
    tensor_ranks: TensorRanks | None
    parameters: dict[str, nn.Parameter]

    @property
    def shards(self) -> int: ...


def padded_shard(rank: Rank, info: TensorInfo) -> torch.Tensor:
    """This rank's shard of a parameter that its group holds, flat, padded to the size of the first shard."""
    local = local_tensor(rank.parameters[info.name].detach()).reshape(-1)
    missing = info.padded_shard_numel(rank.shards) - local.numel()
    return torch.cat([local, local.new_zeros(missing)]) if missing else local


def gather_inside(rank: Rank, shard: torch.Tensor) -> torch.Tensor:
    """All shards of the group, shape (shards, numel of one)."""
    if rank.shards == 1:
        return shard[None]
    whole = shard.new_empty((rank.shards, shard.numel()))
    rank.traffic.record("inside groups", "all_gather", whole.nbytes, rank.shards)
    dist.all_gather(list(whole.unbind()), shard.contiguous(), group=rank.communicators.fsdp)
    return whole


def assemble(shards: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """This tensor-parallel rank's part of the parameter from its padded shards, shape (shards, padded numel)."""
    return shards.reshape(-1)[: info.part.numel()].view(info.part)


def join_parts(rank: Rank, part: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The whole parameter from the tensor-parallel ranks' parts."""
    if rank.tensor_ranks is None or info.tp_dim is None:
        return part
    return rank.tensor_ranks.all_gather(part, info.tp_dim)


def stream_full_state(rank: Rank) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every parameter and persistent buffer of the full model in turn, whole, on rank 0; None elsewhere. Collective.

    The first holder's ranks gather a parameter inside their group, and its first rank sends it to rank 0: one parameter is in
    memory at a time.
    """
    buffers = dict(rank.module.named_buffers())
    for name, infos in (*rank.layout.wholes.items(), *((name, [info]) for name, info in rank.layout.buffers.items())):
        if infos[0].cut is None:
            yield name, _to_rank_0(rank, infos[0], buffers)
            continue
        whole = torch.empty(infos[0].full_shape, dtype=infos[0].dtype, device=rank.device) if rank.rank == 0 else None
        for info in infos:
            part = _to_rank_0(rank, info, buffers)
            if whole is not None and part is not None and info.cut is not None:
                whole.narrow(info.cut.dim, info.cut.start, info.shape[info.cut.dim]).copy_(part)
        yield name, whole


def _to_rank_0(rank: Rank, info: TensorInfo, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The whole parameter, slice or buffer on rank 0; None elsewhere."""
    owner, source = info.holders[0], rank.layout.mesh.rank(info.holders[0])
    whole = None
    if rank.at.sdp == owner:
        if info.name in rank.parameters:
            whole = join_parts(rank, assemble(gather_inside(rank, padded_shard(rank, info)), info), info)
        else:
            whole = buffers[info.name].detach()
    if source != 0 and rank.rank == source:
        assert whole is not None
        dist.send(whole.contiguous(), dst=0)
    elif source != 0 and rank.rank == 0:
        whole = torch.empty(info.shape, dtype=info.dtype, device=rank.device)
        dist.recv(whole, src=source)
    return whole if rank.rank == 0 else None
