"""Gathers tensors of the full model from the groups that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from ..placement.tensor_info import TensorInfo
from ..stores.store import GroupStore


def padded_shard(store: GroupStore, info: TensorInfo) -> torch.Tensor:
    """This rank's shard of a held parameter, flat and padded to the size of the first shard."""
    local = store.part(info.name).to(store.context.device).reshape(-1)
    missing = info.padded_shard_numel(store.context.shards) - local.numel()
    return torch.cat([local, local.new_zeros(missing)]) if missing else local


def gather_inside(store: GroupStore, shard: torch.Tensor) -> torch.Tensor:
    """All shards of the group, shape (shards, elements of one shard)."""
    if store.context.shards == 1:
        return shard[None]
    whole = shard.new_empty((store.context.shards, shard.numel()))
    store.context.traffic.record("inside groups", "all_gather", whole.nbytes, store.context.shards)
    dist.all_gather(list(whole.unbind()), shard.contiguous(), group=store.context.communicators.fsdp)
    return whole


def assemble(shards: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """This tensor-parallel rank's part of the parameter from its padded shards, shape (shards,
    padded numel).
    """
    return shards.reshape(-1)[: info.part.numel()].view(info.part)


def join_parts(store: GroupStore, part: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The whole parameter from the tensor-parallel ranks' parts."""
    if store.context.tensor_ranks is None or info.tp_dim is None:
        return part
    return store.context.tensor_ranks.all_gather(part, info.tp_dim)


def stream_full_state(store: GroupStore) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every whole parameter and persistent buffer on rank 0, and None elsewhere. Collective.

    The ranks of the first holder gather a parameter inside their group, and the first of them sends
    it to rank 0. Only one parameter is in memory at a time.
    """
    buffers = dict(store.module.named_buffers())
    for name, infos in (
        *store.layout.wholes.items(),
        *((name, [info]) for name, info in store.layout.buffers.items()),
    ):
        if infos[0].cut is None:
            yield name, _to_rank_0(store, infos[0], buffers)
            continue
        whole = (
            torch.empty(infos[0].full_shape, dtype=infos[0].dtype, device=store.context.device)
            if store.context.rank == 0
            else None
        )
        for info in infos:
            part = _to_rank_0(store, info, buffers)
            if whole is not None and part is not None and info.cut is not None:
                whole.narrow(info.cut.dim, info.cut.start, info.shape[info.cut.dim]).copy_(part)
        yield name, whole


def _to_rank_0(store: GroupStore, info: TensorInfo, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The whole parameter, slice or buffer on rank 0; None elsewhere."""
    owner, source = info.holders[0], store.layout.mesh.rank(info.holders[0])
    whole = None
    if store.context.at.sdp == owner:
        if info.name in store.parameters:
            whole = join_parts(store, assemble(gather_inside(store, padded_shard(store, info)), info), info)
        else:
            whole = buffers[info.name].detach()
    if source != 0 and store.context.rank == source:
        assert whole is not None
        dist.send(whole.contiguous(), dst=0)
    elif source != 0 and store.context.rank == 0:
        whole = torch.empty(info.shape, dtype=info.dtype, device=store.context.device)
        dist.recv(whole, src=source)
    return whole if store.context.rank == 0 else None
