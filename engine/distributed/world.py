"""All ranks of the run that take part now.

In most runs these are all ranks of torch's default process group, and do not change. With
``sdp.elastic``, the default process group has only the ranks of this SDP group. The ranks of all
living groups then have a process group of their own, and their numbers, which change when a group
is lost or returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from .mesh import Mesh


@dataclass(frozen=True)
class World:
    """The ranks that take part now, if they are not those of the default process group.

    Attributes:
        rank: the number of this rank among them.
        size: how many there are.
        group: their process group. None while the groups have not met: collectives of all ranks
            are then those of this SDP group.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None


_elastic: World | None = None


def enter(world: World | None) -> None:
    """Take part in ``world`` from now on. None is torch's default process group."""
    global _elastic
    _elastic = world


def is_elastic() -> bool:
    """Return whether the ranks that take part may change."""
    return _elastic is not None


def group() -> dist.ProcessGroup | None:
    """Return the process group of all ranks that take part. None is the default one."""
    return _elastic.group if _elastic is not None else None


def rank() -> int:
    """Return the number of this rank among all that take part."""
    return _elastic.rank if _elastic is not None else dist.get_rank()


def size() -> int:
    """Return the number of ranks that take part."""
    return _elastic.size if _elastic is not None else dist.get_world_size()


def position(rank: int, group: dist.ProcessGroup) -> int:
    """Return the position in ``group`` of a rank that takes part, by its number among them."""
    if _elastic is not None and group is _elastic.group:  # torch may know other numbers
        return rank
    return dist.get_group_rank(group, rank)


def inside(mesh: Mesh) -> Mesh:
    """Return the mesh of the ranks in the default process group: ``mesh``, or its SDP group's."""
    return Mesh(1, mesh.fsdp, mesh.tp) if is_elastic() else mesh
