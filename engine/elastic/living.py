"""The layout of the groups that are alive, and a rank's process groups between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.masking import Masking
from ..distributed.mesh import Holders
from ..distributed.process_groups import Communicators, rank_lists
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from .process_groups import Meeting


def living_layout(layout: Layout, groups: Sequence[int]) -> Layout:
    """Return the layout of a run that has only ``groups``. They get new numbers, from 0 on.

    It is that of a run in which the other groups never were: a unit's holders are its living
    holders, and the mesh has the living ranks.

    Args:
        layout: the layout with all groups.
        groups: the living groups, sorted. They must hold all units, see :func:`lost_units`.
    """
    position = {group: index for index, group in enumerate(groups)}

    def left(holders: Holders) -> Holders:
        return tuple(position[group] for group in holders if group in position)

    def living(info: TensorInfo) -> TensorInfo:
        return replace(info, holders=left(info.holders))

    placement = layout.placement
    return replace(
        layout,
        mesh=replace(layout.mesh, sdp=len(groups)),
        placement=replace(
            placement, groups=len(groups), holders=tuple(left(holders) for holders in placement.holders), bound=0
        ),
        parameters={name: living(info) for name, info in layout.parameters.items()},
        buffers={name: living(info) for name, info in layout.buffers.items()},
    )


def lost_units(layout: Layout, groups: Collection[int]) -> list[str]:
    """Return the units that none of the ``groups`` holds."""
    pairs = zip(layout.placement.units, layout.placement.holders, strict=True)
    return [unit for unit, holders in pairs if not set(holders) & set(groups)]


def make_communicators(
    meeting: Meeting,
    rank: int,
    phases: Mapping[Masking, Layout],
    before: Communicators,
    *,
    replicate_inside: bool,
) -> Communicators:
    """Make this rank's process groups, in an order that all ranks share. Collective.

    Args:
        meeting: makes one process group.
        rank: this rank's number among the living ranks.
        phases: the layouts of the living groups, by masking.
        before: the communicators of the last generation. Those inside the group stay.
        replicate_inside: whether nothing is sharded (ZeRO stage 0).
    """
    layout = next(iter(phases.values()))
    mesh = layout.mesh
    made: dict[tuple[int, ...], Any] = {}
    holders: dict[Holders, Any] = {}
    refresh: dict[tuple[int, Holders], Any] = {}
    sets = {info.holders for info in layout.parameters.values()}
    for groups, ranks in rank_lists(mesh, sets, replicate_inside=replicate_inside):
        if rank in ranks:
            key = tuple(ranks)
            if key not in made:
                made[key] = meeting.make_group("-".join(map(str, ranks)), ranks)
            holders[groups] = made[key]
    ways = {(each.source, each.members) for phase in phases.values() for each in phase.refreshes}
    for source, groups in sorted(ways):
        for ranks in zip(*map(mesh.ranks_of, groups), strict=True):
            if rank in ranks:
                label = f"from {source}: {'-'.join(map(str, ranks))}"
                refresh[source, groups] = meeting.make_group(label, ranks)
    return replace(before, mesh=mesh, rank=rank, holders=holders, refresh=refresh)
