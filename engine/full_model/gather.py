"""Gathers tensors of the full model from the groups that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from ..distributed.tensors import local_tensor
from ..placement.tensor_info import TensorInfo
from .backend_view import SubnetworkBackend


def padded_shard(backend: SubnetworkBackend, info: TensorInfo) -> torch.Tensor:
    """This rank's shard of a held parameter, flat and padded to the size of the first shard."""
    local = local_tensor(backend.parameters[info.name].detach()).to(backend.device).reshape(-1)
    missing = info.padded_shard_numel(backend.shards) - local.numel()
    return torch.cat([local, local.new_zeros(missing)]) if missing else local


def gather_inside(backend: SubnetworkBackend, shard: torch.Tensor) -> torch.Tensor:
    """All shards of the group, shape (shards, elements of one shard)."""
    if backend.shards == 1:
        return shard[None]
    whole = shard.new_empty((backend.shards, shard.numel()))
    backend.traffic.record("inside groups", "all_gather", whole.nbytes, backend.shards)
    dist.all_gather(list(whole.unbind()), shard.contiguous(), group=backend.communicators.fsdp)
    return whole


def assemble(shards: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """This tensor-parallel rank's part of the parameter from its padded shards, shape (shards,
    padded numel).
    """
    return shards.reshape(-1)[: info.part.numel()].view(info.part)


def join_parts(backend: SubnetworkBackend, part: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The whole parameter from the tensor-parallel ranks' parts."""
    if backend.tensor_ranks is None or info.tp_dim is None:
        return part
    return backend.tensor_ranks.all_gather(part, info.tp_dim)


def stream_full_state(backend: SubnetworkBackend) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every whole parameter and persistent buffer on rank 0, and None elsewhere. Collective.

    The ranks of the first holder gather a parameter inside their group, and the first of them sends
    it to rank 0. Only one parameter is in memory at a time.
    """
    buffers = dict(backend.module.named_buffers())
    for name, infos in (
        *backend.layout.wholes.items(),
        *((name, [info]) for name, info in backend.layout.buffers.items()),
    ):
        if infos[0].cut is None:
            yield name, _to_rank_0(backend, infos[0], buffers)
            continue
        whole = (
            torch.empty(infos[0].full_shape, dtype=infos[0].dtype, device=backend.device) if backend.rank == 0 else None
        )
        for info in infos:
            part = _to_rank_0(backend, info, buffers)
            if whole is not None and part is not None and info.cut is not None:
                whole.narrow(info.cut.dim, info.cut.start, info.shape[info.cut.dim]).copy_(part)
        yield name, whole


def _to_rank_0(
    backend: SubnetworkBackend, info: TensorInfo, buffers: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The whole parameter, slice or buffer on rank 0; None elsewhere."""
    owner, source = info.holders[0], backend.layout.mesh.rank(info.holders[0])
    whole = None
    if backend.at.sdp == owner:
        if info.name in backend.parameters:
            whole = join_parts(backend, assemble(gather_inside(backend, padded_shard(backend, info)), info), info)
        else:
            whole = buffers[info.name].detach()
    if source != 0 and backend.rank == source:
        assert whole is not None
        dist.send(whole.contiguous(), dst=0)
    elif source != 0 and backend.rank == 0:
        whole = torch.empty(info.shape, dtype=info.dtype, device=backend.device)
        dist.recv(whole, src=source)
    return whole if backend.rank == 0 else None
