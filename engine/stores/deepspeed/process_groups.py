"""The process groups of one rank under DeepSpeed.

There is one for the SDP group, which DeepSpeed sees as its world, and there are those between
groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.mesh import Mesh
from ...distributed.process_groups import Communicators, new_group
from ...distributed.traffic import Traffic
from ...placement.layout import Layout
from ...sync.gradients import GradientSync
from ...sync.weights import WeightRefresh
from .optimizer import local_part
from .partitions import Bundle, rank_sets
from .private import logged_all_reduce, logged_broadcast
from .shard_sync import ShardSync


@dataclass
class Averages:
    """What averages gradients with the groups that take part now.

    Attributes:
        whole: averages whole gradients inside and between groups at once, at stage 0.
        inner: averages whole gradients inside the group, in local steps at stage 0.
        shards: averages the partitions of ZeRO 1 to 3.
    """

    whole: GradientSync | None = None
    inner: GradientSync | None = None
    shards: ShardSync | None = None

    @property
    def exposed_seconds(self) -> float:
        """The time spent waiting for whole gradients after backward, since the start."""
        return sum(each.exposed_seconds for each in (self.whole, self.inner) if each is not None)


class ProcessGroups:
    """The process groups of one rank. Every rank must create them, with the same arguments."""

    def __init__(self, layout: Layout, bundles: Sequence[Bundle], stage: int, *, local_steps: bool = False):
        mesh, rank = layout.mesh, dist.get_rank()
        self.communicators = Communicators.build(
            mesh,
            {info.holders for info in layout.parameters.values()} if stage == 0 else (),
            replicate_inside=True,
            refreshes={(refresh.source, refresh.members) for refresh in layout.refreshes},
            local_steps=local_steps,
        )
        self.mpu: GroupAsWorld | None = None
        self.between: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.inside: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        if mesh.sdp == 1:
            return
        for group in range(mesh.sdp):
            made = new_group(mesh.ranks_of(group))
            if rank in mesh.ranks_of(group):
                self.inside = made  # type: ignore[assignment]
        alone = new_group([dist.get_rank()], use_local_synchronization=True)
        self.mpu = GroupAsWorld(self.inside, alone)  # type: ignore[arg-type]
        for ranks in rank_sets(bundles, stage, mesh) if stage else ():
            made = new_group(list(ranks))
            if rank in ranks:
                self.between[ranks] = made  # type: ignore[assignment]

    def average_whole(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        traffic: Traffic,
        clock: Callable[[], float],
        *,
        local_steps: bool,
    ) -> Averages:
        """Make what averages whole gradients of this rank's ``parameters``, at stage 0."""
        buckets, inside = layout.buckets(lambda _: False), self.communicators.replicas
        between = self.communicators.holders
        whole = GradientSync(buckets, parameters, between, traffic, clock=clock, all_reduce=logged_all_reduce)
        if not local_steps:
            return Averages(whole)
        replicas = {bucket.holders: inside for bucket in buckets} if inside is not None else {}
        inner = GradientSync(buckets, parameters, replicas, traffic, clock=clock, scope="inside groups")
        return Averages(whole, inner)

    def average_shards(self, mesh: Mesh, bundles: Sequence[Bundle], stage: int, traffic: Traffic) -> Averages:
        """Make what averages this rank's partitions of the full model's ``bundles``."""
        rank, held = dist.get_rank(), itertools.count()
        group = mesh.coordinates(rank).sdp
        here = [next(held) if group in bundle.holders else None for bundle in bundles]
        return Averages(shards=ShardSync(bundles, here, stage, mesh, rank, self.between, traffic, logged_all_reduce))

    def make_refresh(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        *,
        stage: int,
        traffic: Traffic,
        dtype: torch.dtype,
    ) -> WeightRefresh:
        """Make what sends the weights of ``parameters`` to frozen copies, in ``dtype``.

        It sends what is in memory. Under ZeRO 3 these are partitions, which align between groups.
        """
        local: Mapping[str, torch.Tensor] = (
            {name: local_part(p) for name, p in parameters.items()} if stage == 3 else parameters
        )
        between = self.communicators.refresh
        return WeightRefresh(layout.refreshes, local, between, traffic, dtype, logged_broadcast)


class GroupAsWorld:
    """The ``mpu`` object for DeepSpeed.

    Data parallelism covers one SDP group. Model parallelism covers this rank only, so that sums
    over it change nothing.
    """

    def __init__(self, data: dist.ProcessGroup, alone: dist.ProcessGroup):
        self._data, self._alone = data, alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
