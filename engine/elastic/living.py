"""The layout of the groups that are alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..distributed.mesh import Holders
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo


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
