"""The bytes that a rank under DeepSpeed sends in a step, computed from the placement."""

from __future__ import annotations

import torch.distributed as dist

from ...distributed.traffic import Traffic
from ...placement.layout import Layout
from .process_groups import ProcessGroups
from .shard_sync import ShardSync


def plan_traffic(
    layout: Layout,
    process_groups: ProcessGroups,
    shard_sync: ShardSync | None,
    *,
    rank: int,
    stage: int,
    compute_bytes: int,
    reduces_whole_gradients: bool,
) -> Traffic:
    """Count what this rank sends in a step. DeepSpeed's communication logger counts its own messages inside a group.

    Args:
        layout: the layout of the full model.
        process_groups: the communicators of this rank.
        shard_sync: the average of partitions between groups; None where there is none.
        rank: the global rank.
        stage: the ZeRO stage.
        compute_bytes: bytes per element of the weights that are sent after a step.
        reduces_whole_gradients: whether whole gradients are averaged between groups, as at stage 0.

    Returns:
        Bytes by kind of message and collective.
    """
    mesh, infos, planned = layout.mesh, layout.parameters, Traffic()
    group = mesh.coordinates(rank).sdp
    if shard_sync is not None:
        shard_sync.plan(planned)
    for bucket in layout.buckets(lambda _: False) if reduces_whole_gradients else ():
        if group in bucket.holders:
            numel = sum(infos[name].numel for name in bucket.names)
            planned.record("between groups", "all_reduce", 4 * numel, mesh.data_ranks_of(bucket.holders))
    for (name, _), routes in process_groups.routes.items():
        for route in routes:
            if route.sent_by(rank) and infos[name].trainable:
                nbytes = route.shared.length * compute_bytes
                planned.record("between groups", "broadcast", nbytes, len(route.shared.ranks))
    ranks_inside = dist.get_world_size(process_groups.inside)
    for refresh in layout.refreshes if not mesh.sizes else ():
        if refresh.sent_by(group):
            numels = (infos[name].numel for name in refresh.names if infos[name].trainable)
            sent = sum(-(-numel // ranks_inside) if stage == 3 else numel for numel in numels)
            planned.record("between groups", "broadcast", sent * compute_bytes, len(refresh.members))
    # The gradient norm and the loss. Under ZeRO, also two checks of the parameters used.
    planned.record("control", "all_reduce", 32 if stage else 16, mesh.world_size)
    return planned
