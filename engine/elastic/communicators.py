"""A rank's process groups between SDP groups, made for one generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.masking import Masking
from ..distributed.mesh import Holders
from ..distributed.process_groups import Communicators, rank_lists
from ..placement.layout import Layout
from .process_groups import Meeting


def make_communicators(
    meeting: Meeting, rank: int, phases: Mapping[Masking, Layout], before: Communicators
) -> Communicators:
    """Make this rank's process groups, in an order that all ranks share. Collective.

    Args:
        meeting: makes one process group.
        rank: this rank's number among the living ranks.
        phases: the layouts of the living groups, by masking.
        before: the communicators of the last generation. Those inside the group stay.
    """
    layout = next(iter(phases.values()))
    mesh = layout.mesh
    made: dict[tuple[int, ...], Any] = {}
    holders: dict[Holders, Any] = {}
    refresh: dict[tuple[int, Holders], Any] = {}
    sets = {info.holders for info in layout.parameters.values()}
    for groups, ranks in rank_lists(mesh, sets, replicate_inside=before.replicate_inside):
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
