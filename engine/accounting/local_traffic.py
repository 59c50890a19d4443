"""Plans the bytes that a rank will send in local steps (``sdp.sync``), from the placement alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..config.sync import SyncSection
from ..distributed.traffic import Traffic
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..sync.compression import sent_nbytes
from ..sync.rounds import Rounds, fragments_of
from .traffic_plan import CollectivePlan

FACTS_BYTES = 24  # of an outer step: drift, norm of the anchors, norm of the outer gradient, each a float64


class LocalTraffic:
    """The bytes that ``rank`` sends in each step of a run with local steps.

    An inner step sends nothing between groups, except the loss and the gradient norm. The changes
    of a fragment are counted in the step after which its average starts, and the refresh of frozen
    copies in the step after which it is applied.
    """

    def __init__(
        self, layout: Layout, rank: int, sync: SyncSection, *, stage: int, accumulation: int, compute_bytes: int
    ):
        self._layout, self._sync, self._rounds = layout, sync, Rounds(sync)
        self._rank, self._at = rank, layout.mesh.coordinates(rank)
        self._shards, self._compute_bytes = layout.mesh.shards(stage), compute_bytes
        self._fragments = fragments_of(layout, sync.fragments)
        self._every_step, self._inner = (
            CollectivePlan(layout, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes, local=local)
            for local in (False, True)
        )

    def of_step(self, step: int) -> Traffic:
        """Return the bytes of one step. Steps are numbered from 1."""
        traffic = Traffic()
        plan = self._inner if self._rounds.is_local(step) else self._every_step
        for collective in plan.of(self._rank):
            traffic.record(collective.scope, collective.kind, collective.nbytes, len(collective.ranks))
        starting, arriving = self._rounds.starting(step), self._rounds.arriving(step)
        if starting is not None:
            self.add_changes(starting, traffic)
        if arriving is not None:
            self.add_arrival(arriving, traffic)
        return traffic

    def of_round(self) -> Traffic:
        """Return the bytes of all steps of a round."""
        traffic, first = Traffic(), self._sync.start_after + 2 * self._sync.every
        for step in range(first + 1, first + self._sync.every + 1):
            traffic.add(self.of_step(step))
        return traffic

    def add_changes(self, fragment: int, traffic: Traffic) -> None:
        """Count the changes that this rank sends when the average of ``fragment`` starts."""
        replicas = self._layout.mesh.fsdp if self._shards == 1 else 1
        for info in self._trained(fragment):
            ranks = len(info.holders) * replicas
            if len(info.holders) == 1:
                continue
            first, last = info.shard_rows(self._shards, self._at.fsdp if self._shards > 1 else 0)
            shape = (last - first, *info.part[1:]) if info.shape else ()
            if self._sync.compression == "int8":
                traffic.record("between groups", "all_gather", ranks * sent_nbytes(shape, "int8"), ranks)
            else:
                traffic.record("between groups", "all_reduce", sent_nbytes(shape, self._sync.compression), ranks)

    def add_arrival(self, fragment: int, traffic: Traffic) -> None:
        """Count what this rank sends when the average of ``fragment`` is applied: copies, buffers, facts."""
        index = self._at.fsdp if self._shards > 1 else 0
        for refresh in self._layout.refreshes:
            if refresh.sent_by(self._at.sdp):
                infos = [self._layout.parameters[name] for name in refresh.names if self._fragments[name] == fragment]
                numel = sum(info.shard_numel(self._shards, index) for info in infos)
                if numel:
                    traffic.record("between groups", "broadcast", numel * self._compute_bytes, len(refresh.members))
        world = self._layout.mesh.world_size
        buffers = [info for name, info in self._layout.buffers.items() if self._fragments[name] == fragment]
        floats = sum(info.numel for info in buffers if info.dtype.is_floating_point)
        others = sum(info.numel * info.dtype.itemsize for info in buffers if not info.dtype.is_floating_point)
        traffic.record("control", "all_reduce", FACTS_BYTES + 2 * 8 * floats + others, world)

    def _trained(self, fragment: int) -> Iterator[TensorInfo]:
        for info in self._layout.held(self._at.sdp):
            if info.trainable and self._fragments[info.name] == fragment:
                yield info
