"""Gathers tensors of the full model from the groups that hold them, and averages buffers.

The buffers are batch norm's running statistics. Every rank tracks the statistics of its own data
while it trains. A unit's buffers become the mean over the ranks of its holders, and buffers of the
shared part become the mean over all ranks. Buffers are averaged only when they are read or saved:
in evaluation, the full state and checkpoints. Averages after every step would give the same values,
because no step reads the buffers and an update, (1 - m) · old + m · batch, is linear in them.

Two kinds of entries get the mean but do not count in the mean: entries of a unit that a rank runs
from a frozen copy, and entries of neurons that a group does not hold. Buffers that are not
floating-point (counts of batches) are taken from the first rank of the first holder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist

from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..stores.store import GroupStore


def padded_shard(store: GroupStore, info: TensorInfo) -> torch.Tensor:
    """Return this rank's shard of a parameter, flat and padded to the size of the first shard."""
    local = store.local_weight(info.name).to(store.context.device).reshape(-1)
    missing = info.padded_shard_numel(store.context.shards) - local.numel()
    return torch.cat([local, local.new_zeros(missing)]) if missing else local


def gather_inside(store: GroupStore, shard: torch.Tensor) -> torch.Tensor:
    """Gather the shards of all ranks of the group, with shape (shards, elements of one shard)."""
    if store.context.shards == 1:
        return shard[None]
    whole, group = shard.new_empty((store.context.shards, shard.numel())), store.context.communicators.fsdp
    store.context.traffic.record("inside groups", "all_gather", whole.nbytes, dist.get_process_group_ranks(group))
    dist.all_gather(list(whole.unbind()), shard.contiguous(), group=group)
    return whole


def assemble(shards: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Join ``shards`` (shards, padded numel) to a tensor of ``info.tp_shape``, without padding."""
    return shards.reshape(-1)[: info.tp_shape.numel()].view(info.tp_shape)


def join_tensor_parallel(store: GroupStore, part: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Join the ``part`` of a parameter on each tensor-parallel rank to the whole parameter."""
    if store.context.tensor_ranks is None or info.tp_dim is None:
        return part
    return store.context.tensor_ranks.all_gather(part, info.tp_dim)


def stream_full_state(store: GroupStore) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every whole parameter and persistent buffer on rank 0, and None elsewhere. Collective.

    The ranks of the first holder gather a parameter inside their group, and one of them sends it to
    rank 0. Only one parameter is in memory at a time.
    """
    buffers = persistent_buffers(store)
    for name, infos in (*store.layout.wholes.items(), *((name, [info]) for name, info in store.layout.buffers.items())):
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
    """Return the whole parameter, slice or buffer on rank 0, and None elsewhere."""
    owner, source = info.holders[0], store.layout.mesh.rank(info.holders[0])
    whole = None
    if store.context.at.sdp == owner:
        if info.name in store.parameters:
            whole = join_tensor_parallel(store, assemble(gather_inside(store, padded_shard(store, info)), info), info)
        else:
            whole = buffers[info.name]
    if source != 0 and store.context.rank == source:
        assert whole is not None
        dist.send(whole.contiguous(), dst=0)
    elif source != 0 and store.context.rank == 0:
        whole = torch.empty(info.shape, dtype=info.dtype, device=store.context.device)
        dist.recv(whole, src=source)
    return whole if store.context.rank == 0 else None


def persistent_buffers(store: GroupStore) -> dict[str, torch.Tensor]:
    """Return this rank's persistent buffers, by canonical name.

    They are detached from autograd, because a backward pass may still follow.
    """
    infos = store.layout.buffers_at(store.context.at.sdp)
    return {infos[path].name: buffer.data for path, buffer in store.module.named_buffers() if path in infos}


def held_entries(layout: Layout, group: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return, for each floating-point buffer, a mask of the entries that ``group`` holds.

    A mask has the shape of the buffer. Entries of the shared part count as held.
    """
    floating = ((name, info) for name, info in layout.buffers.items() if info.dtype.is_floating_point)
    held = {name: torch.full(info.shape, group in info.holders, device=device) for name, info in floating}
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        for part in unit.buffers:
            ((first, last),) = part.ranges
            held[part.parameter][first:last] = group in holders
    return held


class BufferMean:
    """Computes the mean of floating-point buffers, for each entry over the ranks that hold it.

    A rank adds its buffers, sums over all ranks, and then writes the means into its buffers. Sums
    are in float64, so the mean of equal values is exactly that value.
    """

    def __init__(self, buffers: Mapping[str, TensorInfo], device: torch.device):
        """``buffers`` describes the buffers to average, the same on all ranks."""
        self._shapes = {name: info.shape for name, info in buffers.items() if info.dtype.is_floating_point}
        total = sum(shape.numel() for shape in self._shapes.values())
        # The first row sums the values, the second one counts them.
        self._sums = torch.zeros((2, total), dtype=torch.float64, device=device)

    def add(self, buffers: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
        """Add those entries of a rank's ``buffers`` that its group holds (:func:`held_entries`)."""
        for name, sums in zip(self._shapes, self._split(), strict=True):
            if name in buffers:
                counts = held[name].view(-1)
                # Multiplying by 0 would turn an infinite entry into NaN.
                sums[0] += buffers[name].reshape(-1).double().masked_fill(~counts, 0)
                sums[1] += counts

    def over(self, all_reduce: Callable[[torch.Tensor], None]) -> BufferMean:
        """Sum what all ranks have added. ``all_reduce`` sums float64 values in place."""
        if self._sums.numel():
            all_reduce(self._sums)
        return self

    def give(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Replace the values of ``buffers`` in place by their means over the ranks."""
        for (name, shape), sums in zip(self._shapes.items(), self._split(), strict=True):
            if name in buffers:
                buffers[name].copy_((sums[0] / sums[1]).view(shape))

    def _split(self) -> tuple[torch.Tensor, ...]:
        return self._sums.split([shape.numel() for shape in self._shapes.values()], dim=1)


def agree_on_buffers(store: GroupStore, names: Collection[str] | None = None) -> None:
    """Give persistent buffers the full model's values, bit for bit equal on all ranks. Collective.

    ``names`` are the buffers to set, the same on all ranks. Default: all buffers.
    """
    layout = store.layout
    infos = {name: info for name, info in layout.buffers.items() if names is None or name in names}
    if layout.mesh.world_size == 1 or not infos:
        return
    buffers = {name: buffer for name, buffer in persistent_buffers(store).items() if name in infos}
    mean = BufferMean(infos, store.context.device)
    mean.add(buffers, held_entries(layout, store.context.at.sdp, store.context.device))
    mean.over(store.context.all_reduce_control).give(buffers)
    _take_first_holders(store, buffers, infos)


def _take_first_holders(
    store: GroupStore, buffers: Mapping[str, torch.Tensor], infos: Mapping[str, TensorInfo]
) -> None:
    """Take buffers that are not floating-point from their first holder.

    They are summed as bytes, where all ranks but one contribute zeros.
    """
    others = {name: info for name, info in infos.items() if not info.dtype.is_floating_point}
    if not others:
        return
    messages = []
    for name, info in others.items():
        gives = store.context.rank == store.layout.mesh.rank(info.holders[0])
        value = buffers[name] if gives else torch.zeros(info.shape, dtype=info.dtype, device=store.context.device)
        messages.append(value.contiguous().view(-1).view(torch.uint8))
    total = torch.cat(messages)
    store.context.all_reduce_control(total)
    for (name, info), value in zip(others.items(), total.split([len(part) for part in messages]), strict=True):
        if name in buffers:
            buffers[name].copy_(value.clone().view(info.dtype).view(info.shape))
