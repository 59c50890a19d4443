"""Plans the bytes that a rank will send in local steps (``sdp.sync``), from the placement alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..config.method import SyncSection
from ..distributed.collectives import Traffic
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..sync.outer import Rounds, fragments_of, sent_nbytes
from .traffic_plan import Collective, CollectivePlan

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
        starting, arriving = self._rounds.starting(step), self._rounds.arriving(step)
        collectives = self.training(local=self._rounds.is_local(step))
        if starting is not None:
            collectives += self.changes(starting)
        if arriving is not None:
            collectives += self.copies(arriving)
            self._add_facts(arriving, traffic)
        for one in collectives:
            traffic.record(one.scope, one.kind, one.nbytes, len(one.ranks))
        return traffic

    def of_round(self) -> Traffic:
        """Return the bytes of all steps of a round."""
        traffic, first = Traffic(), self._sync.start_after + 2 * self._sync.every
        for step in range(first + 1, first + self._sync.every + 1):
            traffic.add(self.of_step(step))
        return traffic

    def round_between_groups(self) -> list[Collective]:
        """Return what crosses between groups in a round: changes of all fragments, and refreshed
        copies.
        """
        fragments = self._rounds.fragments
        return [one for fragment in fragments for one in (*self.changes(fragment), *self.copies(fragment))]

    def in_busiest_step(self) -> float:
        """Return the bytes that this rank sends between groups in the step in which it sends most.

        With overlap, frozen copies are refreshed in another step than changes are sent.
        """
        steps: list[list[Collective]] = []
        for fragment in self._rounds.fragments:
            changes, copies = self.changes(fragment), self.copies(fragment)
            steps += [changes, copies] if self._sync.overlap else [changes + copies]
        return max(sum(one.sent for one in step) for step in steps)

    def training(self, *, local: bool) -> list[Collective]:
        """Return what a step without an outer step sends.

        ``local``: groups take the step on their own.
        """
        return (self._inner if local else self._every_step).of(self._rank)

    def changes(self, fragment: int) -> list[Collective]:
        """Return the averages of a fragment in which this rank takes part."""
        found, index = [], self._at.fsdp if self._shards > 1 else 0
        for info in self._trained(fragment):
            if len(info.holders) > 1:
                ranks = self._inner.ranks_of(info.holders, self._at)
                first, last = info.shard_rows(self._shards, index)
                shape = (last - first, *info.part[1:]) if info.shape else ()
                nbytes = sent_nbytes(shape, self._sync.compression)
                gathers = self._sync.compression == "int8"
                kind, whole = ("all_gather", nbytes * len(ranks)) if gathers else ("all_reduce", nbytes)
                found.append(Collective("between groups", kind, ranks, whole))
        return found

    def copies(self, fragment: int) -> list[Collective]:
        """Return the refreshes of frozen copies that this rank sends after a fragment's average is
        applied.
        """
        found, index = [], self._at.fsdp if self._shards > 1 else 0
        for refresh in self._layout.refreshes:
            if refresh.sent_by(self._at.sdp):
                infos = [self._layout.parameters[name] for name in refresh.names if self._fragments[name] == fragment]
                nbytes = self._compute_bytes * sum(info.shard_numel(self._shards, index) for info in infos)
                ranks = tuple(self._layout.mesh.rank(g, self._at.fsdp, self._at.tp) for g in sorted(refresh.members))
                found += [Collective("between groups", "broadcast", ranks, nbytes)] * (nbytes > 0)
        return found

    def _add_facts(self, fragment: int, traffic: Traffic) -> None:
        """Count what all ranks sum when an average is applied: facts for the metrics, and
        buffers.
        """
        buffers = [info for name, info in self._layout.buffers.items() if self._fragments[name] == fragment]
        floats = sum(info.numel for info in buffers if info.dtype.is_floating_point)
        others = sum(info.numel * info.dtype.itemsize for info in buffers if not info.dtype.is_floating_point)
        nbytes = FACTS_BYTES + 2 * 8 * floats + others
        traffic.record("control", "all_reduce", nbytes, self._layout.mesh.world_size)

    def _trained(self, fragment: int) -> Iterator[TensorInfo]:
        for info in self._layout.held(self._at.sdp):
            if info.trainable and self._fragments[info.name] == fragment:
                yield info
