"""The process groups of one rank under DeepSpeed.

There is one for the SDP group, which DeepSpeed sees as its world, and there are those between
groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...distributed.process_groups import Communicators
from ...distributed.traffic import Traffic
from ...placement.layout import Layout
from ...sync.weights import WeightRefresh
from .optimizer import local_part
from .partitions import Bundle, Route, RoutedRefresh, rank_sets, routes_of
from .private import logged_broadcast


class ProcessGroups:
    """The process groups of one rank. Every rank must create them, with the same arguments."""

    def __init__(self, layout: Layout, bundles: Sequence[Bundle], stage: int, *, local_steps: bool = False):
        mesh, rank = layout.mesh, dist.get_rank()
        self.communicators = Communicators.build(
            mesh,
            {info.holders for info in layout.parameters.values()} if stage == 0 else (),
            replicate_inside=True,
            refreshes={(refresh.source, refresh.members) for refresh in layout.refreshes} if not mesh.sizes else (),
            local_steps=local_steps,
        )
        self.mpu: GroupAsWorld | None = None
        self.between: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.inside: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        # How frozen copies are sent between groups of unequal size, by parameter name and source
        # group.
        self.routes: dict[tuple[str, int], list[Route]] = {}
        if mesh.sdp == 1:
            return
        for group in range(mesh.sdp):
            made = dist.new_group(mesh.ranks_of(group))
            if rank in mesh.ranks_of(group):
                self.inside = made  # type: ignore[assignment]
        alone = dist.new_group([rank], use_local_synchronization=True)
        self.mpu = GroupAsWorld(self.inside, alone)  # type: ignore[arg-type]
        for refresh in layout.refreshes if mesh.sizes else ():
            for name in refresh.names:
                self.routes[name, refresh.source] = routes_of(name, layout.parameters[name].numel, refresh, stage, mesh)
        reduced = rank_sets(bundles, stage, mesh) if stage else []
        for ranks in sorted({*reduced, *(route.shared.ranks for routes in self.routes.values() for route in routes)}):
            made = dist.new_group(list(ranks))
            if rank in ranks:
                self.between[ranks] = made  # type: ignore[assignment]

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

        It sends what is in memory. Under ZeRO 3 these are partitions, which align between groups of
        equal size.
        """
        local: Mapping[str, torch.Tensor] = (
            {name: local_part(p) for name, p in parameters.items()} if stage == 3 else parameters
        )
        if not layout.mesh.sizes:
            between = self.communicators.refresh
            return WeightRefresh(layout.refreshes, local, between, traffic, dtype, logged_broadcast)
        rank = dist.get_rank()
        return RoutedRefresh(layout.refreshes, local, self.routes, self.between, rank, traffic, dtype, logged_broadcast)


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
