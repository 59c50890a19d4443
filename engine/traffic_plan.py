"""Bytes that a rank will send in one optimizer step, from the placement alone: what ``traffic.py`` then counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Layout
from .traffic import Kind, Scope, Traffic, sent_bytes

FLOAT32 = 4
CONTROL_BYTES = 16  # the squared gradient norm and the loss, a float64 each


@dataclass(frozen=True)
class Collective:
    """All of a step's collectives of one kind among the same ``ranks``; ``nbytes``: of their whole buffers."""

    scope: Scope
    kind: Kind
    ranks: tuple[int, ...]
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends; of a broadcast the buffer, which it has or passes on."""
        return sent_bytes(self.kind, self.nbytes, len(self.ranks))


def plan_collectives(layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int) -> list[Collective]:
    """What ``rank`` sends in one training step under ZeRO ``stage``, by who takes part.

    Between groups: every trainable parameter of a unit with n holder ranks is all-reduced once, 2(n − 1)/n of its local shard in
    float32. Inside a group of F ranks: parameters are gathered in compute precision (``compute_bytes`` an element) once a step at
    stages 1 and 2, twice a micro-batch (forward and backward) at stage 3; gradients are reduce-scattered in float32, once a step
    at stage 1, every micro-batch at stages 2 and 3; (F − 1)/F of the padded parameter each time. One scalar for the norm.

    Frozen copies (backward masking) are gathered as parameters are; the holder that refreshes a unit broadcasts its local shard in compute
    precision once a step, and all but one of the groups that receive it pass it on.

    Under tensor parallelism all of this is of a rank's part of the matrices, and gradients of what is not cut (norms) are gathered once
    a step. What its ranks send of activations ("tensor parallel") depends on the batch, not on the placement: ``trace.py`` knows it.
    """
    mesh, grid = layout.mesh, layout.mesh.grid
    at = mesh.coordinates(rank)
    shards = mesh.shards(stage)
    gathers = 2 * accumulation if stage == 3 else 1
    scatters = accumulation if stage >= 2 else 1
    index = at.fsdp if shards > 1 else 0
    inside = tuple(grid[at.sdp, :, at.tp].tolist()) if shards > 1 else (rank,)
    neighbours = tuple(grid[at.sdp, at.fsdp].tolist())

    def across(groups: Sequence[int]) -> tuple[int, ...]:
        rows = grid[list(groups), :, at.tp] if shards == 1 else grid[list(groups), at.fsdp, at.tp]
        return tuple(rows.flatten().tolist())

    totals: Counter[tuple[Scope, Kind, tuple[int, ...]]] = Counter()
    for info in layout.held(at.sdp):
        padded = info.padded_shard_numel(shards) * shards
        totals["inside groups", "all_gather", inside] += gathers * padded * compute_bytes
        if info.trainable:
            local = info.shard_numel(shards, index)
            totals["between groups", "all_reduce", across(info.holders)] += local * FLOAT32
            totals["inside groups", "reduce_scatter", inside] += scatters * padded * FLOAT32
            if info.tp_dim is None:
                totals["inside groups", "all_gather", neighbours] += local * FLOAT32 * mesh.tp
    for info in layout.frozen(at.sdp):
        totals["inside groups", "all_gather", inside] += gathers * info.padded_shard_numel(shards) * shards * compute_bytes
    for refresh in layout.refreshes:
        if refresh.sent_by(at.sdp):
            members = tuple(grid[list(refresh.members), at.fsdp, at.tp].tolist())
            totals["between groups", "broadcast", members] += _numel(layout, refresh.names, shards, index) * compute_bytes
    totals["control", "all_reduce", tuple(range(mesh.world_size))] += CONTROL_BYTES
    return [Collective(*key, nbytes) for key, nbytes in totals.items() if len(key[2]) > 1 and nbytes]


def plan_traffic(layout: Layout, rank: int, *, stage: int, accumulation: int, compute_bytes: int) -> Traffic:
    """:func:`plan_collectives`, added up as they are counted in a run."""
    traffic = Traffic()
    for collective in plan_collectives(layout, rank, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes):
        traffic.record(collective.scope, collective.kind, collective.nbytes, len(collective.ranks))
    return traffic


def data_parallel_traffic(layout: Layout) -> Traffic:
    """What every rank of DistributedDataParallel over the same ranks sends: one all-reduce of all float32 gradients."""
    traffic = Traffic()
    numel = sum(info.numel for info in layout.parameters.values() if info.trainable)
    traffic.record("between groups", "all_reduce", numel * FLOAT32, layout.mesh.world_size)
    return traffic


def _refreshed(layout: Layout, group: int, shards: int, index: int) -> int:
    """Elements that a rank of ``group`` sends after a step, as the source of frozen copies or passing them on."""
    return sum(_numel(layout, refresh.names, shards, index) for refresh in layout.refreshes if refresh.sent_by(group))


def _numel(layout: Layout, names: Sequence[str], shards: int, index: int) -> int:
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
