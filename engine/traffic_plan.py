"""Bytes that a rank will send in one optimizer step, from the placement alone: what ``traffic.py`` then counts."""

from __future__ import annotations

from .layout import Layout
from .traffic import Traffic

FLOAT32 = 4
CONTROL_BYTES = 16  # the squared gradient norm and the loss, a float64 each


def plan_traffic(layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int) -> Traffic:
    """The traffic of one training step of ``rank`` under ZeRO ``stage``.

    Between groups: every trainable parameter of a unit with n holder ranks is all-reduced once, 2(n − 1)/n of its local shard in
    float32. Inside a group of F ranks: parameters are gathered in compute precision (``compute_bytes`` an element) once a step at
    stages 1 and 2, twice a micro-batch (forward and backward) at stage 3; gradients are reduce-scattered in float32, once a step
    at stage 1, every micro-batch at stages 2 and 3; (F − 1)/F of the padded parameter each time. One scalar for the norm.

    Frozen copies (backward masking) are gathered as parameters are; the holder that refreshes a unit broadcasts its local shard in compute
    precision once a step.

    Under tensor parallelism all of this is of a rank's part of the matrices, and gradients of what is not cut (norms) are gathered once
    a step. What its ranks send of activations ("tensor parallel") depends on the batch, not on the placement: it is counted, not planned.
    """
    mesh, traffic = layout.mesh, Traffic()
    at = mesh.coordinates(rank)
    shards = mesh.shards(stage)
    replicas = mesh.fsdp // shards
    gathers = 2 * accumulation if stage == 3 else 1
    scatters = accumulation if stage >= 2 else 1
    index = at.fsdp if shards > 1 else 0
    for info in layout.held(at.sdp):
        padded = info.padded_shard_numel(shards) * shards
        traffic.record("inside groups", "all_gather", gathers * padded * compute_bytes, shards)
        if info.trainable:
            local = info.shard_numel(shards, index)
            traffic.record("between groups", "all_reduce", local * FLOAT32, len(info.holders) * replicas)
            traffic.record("inside groups", "reduce_scatter", scatters * padded * FLOAT32, shards)
            if info.tp_dim is None:
                traffic.record("inside groups", "all_gather", local * FLOAT32 * mesh.tp, mesh.tp)
    for info in layout.frozen(at.sdp):
        traffic.record("inside groups", "all_gather", gathers * info.padded_shard_numel(shards) * shards * compute_bytes, shards)
    if refreshed := _refreshed(layout, at.sdp, shards, index):
        traffic.record("between groups", "broadcast", refreshed * compute_bytes, mesh.sdp)
    traffic.record("control", "all_reduce", CONTROL_BYTES, mesh.world_size)
    return traffic


def data_parallel_traffic(layout: Layout) -> Traffic:
    """What every rank of DistributedDataParallel over the same ranks sends: one all-reduce of all float32 gradients."""
    traffic = Traffic()
    numel = sum(info.numel for info in layout.parameters.values() if info.trainable)
    traffic.record("between groups", "all_reduce", numel * FLOAT32, layout.mesh.world_size)
    return traffic


def _refreshed(layout: Layout, group: int, shards: int, index: int) -> int:
    """Elements that a rank of ``group`` sends after a step, as the source of frozen copies."""
    names = [name for refresh in layout.refreshes if refresh.source == group for name in refresh.names]
    return sum(layout.parameters[name].shard_numel(shards, index) for name in names if layout.parameters[name].trainable)


def describe_formula(layout: Layout, rank: int, *, stage: int, compute_bytes: int = FLOAT32) -> str:
    """The between-groups formula with this rank's numbers filled in."""
    at = layout.mesh.coordinates(rank)
    shards = layout.mesh.shards(stage)
    index = at.fsdp if shards > 1 else 0
    terms: dict[int, int] = {}
    for info in layout.held(at.sdp):
        ranks = len(info.holders) * (layout.mesh.fsdp // shards)
        if info.trainable and ranks > 1:
            terms[ranks] = terms.get(ranks, 0) + info.shard_numel(shards, index) * FLOAT32
    parts = [f"2·{n - 1}/{n}·{nbytes:,} B" for n, nbytes in sorted(terms.items())]
    refreshed = _refreshed(layout, at.sdp, shards, index) * compute_bytes
    parts += [f"{refreshed:,} B of new weights"] * (refreshed > 0)
    return " + ".join(parts) or "nothing is sent between groups"
