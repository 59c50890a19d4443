"""The bytes that a rank under DeepSpeed sends in a step, computed from the placement.

DeepSpeed's communication logger counts its own messages inside a group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import torch.distributed as dist

from ...accounting.local_traffic import LocalTraffic
from ...accounting.traffic_plan import LOCAL_CONTROL_BYTES, NORM_BYTES, Collective
from ...config.sync import SyncSection
from ...placement.layout import Layout
from ...sync.compression import sent_nbytes
from .local_steps import Box
from .process_groups import ProcessGroups
from .shard_sync import ShardSync

FLOAT32, CHECK_BYTES = 4, 16  # two float64 checks of the parameters that ZeRO has reduced


class TrafficPlan:
    """The messages of one rank in a step.

    Args:
        layout: the layout of the full model.
        process_groups: the communicators of this rank.
        shard_sync: the average of partitions between groups; None where there is none.
        rank: the global rank.
        stage: the ZeRO stage.
        compute_bytes: bytes per element of the weights that are sent after a step.
        reduces_whole_gradients: whether whole gradients are averaged by sdp, as at stage 0.
    """

    def __init__(
        self,
        layout: Layout,
        process_groups: ProcessGroups,
        shard_sync: ShardSync | None,
        *,
        rank: int,
        stage: int,
        compute_bytes: int,
        reduces_whole_gradients: bool,
    ):
        self._layout, self._shard_sync = layout, shard_sync
        self._rank, self._stage, self._compute_bytes = rank, stage, compute_bytes
        self._reduces_whole_gradients = reduces_whole_gradients
        self._group = layout.mesh.coordinates(rank).sdp
        self._ranks_inside = dist.get_world_size(process_groups.inside)

    def common_step(self) -> list[Collective]:
        """Return what a step sends in which gradients are averaged between groups."""
        mesh, found = self._layout.mesh, []
        if self._shard_sync is not None:
            parts = self._shard_sync.stretches_here()
            found += [Collective("between groups", "all_reduce", of.ranks, FLOAT32 * of.length) for of in parts]
        for holders, numel in self._whole_gradients():
            ranks = tuple(chain(*map(mesh.ranks_of, holders)))
            found.append(Collective("between groups", "all_reduce", ranks, FLOAT32 * numel))
        # Control messages are the gradient norm and the loss.
        return [*found, *self.refreshes(self._layout.parameters), self._control(16 + self._check_bytes)]

    def local_step(self) -> list[Collective]:
        """Return what a step sends that groups take on their own."""
        inside = tuple(self._layout.mesh.ranks_of(self._group))
        found = [
            Collective("inside groups", "all_reduce", inside, FLOAT32 * numel) for _, numel in self._whole_gradients()
        ]
        found.append(Collective("control", "all_reduce", inside, NORM_BYTES))
        return [*found, self._control(LOCAL_CONTROL_BYTES + self._check_bytes)]

    def _control(self, nbytes: int) -> Collective:
        return Collective("control", "all_reduce", tuple(range(self._layout.mesh.world_size)), nbytes)

    @property
    def _check_bytes(self) -> int:
        return CHECK_BYTES if self._stage else 0

    def _whole_gradients(self) -> Iterable[tuple[tuple[int, ...], int]]:
        """Return holders and elements of every message of whole gradients."""
        if not self._reduces_whole_gradients:
            return []
        infos = self._layout.parameters
        buckets = [bucket for bucket in self._layout.buckets(lambda _: False) if self._group in bucket.holders]
        return [(bucket.holders, sum(infos[name].numel for name in bucket.names)) for bucket in buckets]

    def refreshes(self, names: Collection[str], *, untrained: bool = False) -> list[Collective]:
        """Return the messages with the weights of ``names`` for frozen copies.

        Those that are not trained are only sent with ``untrained``.
        """
        layout, infos, found = self._layout, self._layout.parameters, []
        names = {name for name in names if infos[name].trainable or untrained} if layout.keeps_frozen else ()
        position = layout.mesh.coordinates(self._rank).fsdp
        for refresh in layout.refreshes:
            if refresh.sent_by(self._group):
                numels = [infos[name].numel for name in refresh.names if name in names]
                sent = sum(-(-numel // self._ranks_inside) if self._stage == 3 else numel for numel in numels)
                ranks = tuple(layout.mesh.rank(group, position) for group in sorted(refresh.members))
                found += [Collective("between groups", "broadcast", ranks, sent * self._compute_bytes)] * (sent > 0)
        return found


class LocalTrafficPlan(LocalTraffic):
    """The messages of one rank in each step of a run with local steps.

    ``boxes`` are those that it averages.
    """

    def __init__(self, layout: Layout, rank: int, sync: SyncSection, plan: TrafficPlan, boxes: Collection[Box]):
        super().__init__(layout, rank, sync, stage=0, accumulation=1, compute_bytes=FLOAT32)
        self._plan, self._boxes = plan, boxes

    def training(self, *, local: bool) -> list[Collective]:
        return self._plan.local_step() if local else self._plan.common_step()

    def changes(self, fragment: int) -> list[Collective]:
        infos, compression, found = self._layout.parameters, self._sync.compression, []
        for box in self._boxes:
            if self._fragments[box.name] == fragment and len(infos[box.name].holders) > 1:
                nbytes, gathers = sent_nbytes(box.sizes, compression), compression == "int8"
                kind, whole = ("all_gather", nbytes * len(box.ranks)) if gathers else ("all_reduce", nbytes)
                found.append(Collective("between groups", kind, box.ranks, whole))
        return found

    def copies(self, fragment: int) -> list[Collective]:
        return self._plan.refreshes({name for name, of in self._fragments.items() if of == fragment})
