"""The process groups of the grid of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .mesh import Holders, Mesh


def new_group(ranks: list[int], **more: Any) -> dist.ProcessGroup:
    """Create a process group with the time limit of the world.

    By itself, torch would give it the default limit. It gets that one, too, if the backend of the
    world does not show its limit.

    Args:
        ranks: its ranks.
        **more: further arguments of ``torch.distributed.new_group``.
    """
    device = torch.device("cuda" if _backend() is not None else "cpu")
    try:
        timeout = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # as for MPI and UCC
        timeout = None
    return dist.new_group(ranks, timeout=timeout, **more)  # type: ignore[return-value]


def tensor_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Create the process group of this rank's tensor-parallel neighbours.

    Every rank must call this. Returns None if the rank has no such neighbours.
    """
    if mesh.tp == 1:
        return None
    if mesh.tp == mesh.world_size:
        return dist.group.WORLD  # type: ignore[return-value]
    own_group = None
    for ranks in mesh.all_neighbours():
        group = new_group(list(ranks), backend=_backend())
        if dist.get_rank() in ranks:
            own_group = group
    return own_group  # type: ignore[return-value]


def _backend() -> str | None:
    """Return the backend for new groups, or None for the backend of the world.

    Without a backend, each new group would also open gloo connections, in addition to NCCL's.
    """
    return "nccl" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else None


def rank_lists(
    mesh: Mesh, holder_sets: Iterable[Holders], *, replicate_inside: bool
) -> Iterator[tuple[Holders, list[int]]]:
    """Yield each list of ranks that average together, with their SDP groups. The order is that of
    the world. The set of all groups is always included. A single rank has no list.

    Args:
        mesh: the grid of ranks.
        holder_sets: the holder sets of the placement.
        replicate_inside: whether nothing is sharded (ZeRO stage 0).
    """
    for holders in sorted(set(holder_sets) | {tuple(range(mesh.sdp))}):
        for tp in range(mesh.tp):
            rows = [mesh.ranks_of(group)[tp :: mesh.tp] for group in holders]
            for ranks in [list(chain(*rows))] if replicate_inside else map(list, zip(*rows, strict=True)):
                if len(ranks) > 1:
                    yield holders, ranks


@dataclass
class Communicators:
    """The process groups of one rank.

    Attributes:
        mesh: the grid of ranks.
        rank: the global rank.
        replicate_inside: whether nothing is sharded (ZeRO stage 0). Then the ranks of a group
            average among themselves in the same all-reduce as the holders.
        fsdp: the ranks that shard this group's state. It contains only this rank if FSDP2 wraps
            parameters that are not sharded.
        holders: for each holder set, the ranks that average its gradients. Sets with only this rank
            are absent.
        refresh: for a source group and the groups that take part, the ranks at this rank's
            position. The source sends new weights for frozen copies. Each source has a communicator
            of its own, because a communicator runs operations one by one, and a link can send in
            both directions at once.
        group: for local steps, all ranks of this rank's SDP group. None if this is the only rank.
        replicas: for local steps, the ranks that average gradients inside this group. None if the
            group's state is sharded, or has only one rank.
    """

    mesh: Mesh
    rank: int
    replicate_inside: bool
    fsdp: dist.ProcessGroup | None = None
    holders: dict[Holders, dist.ProcessGroup] = field(default_factory=dict)
    refresh: dict[tuple[int, Holders], dist.ProcessGroup] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        holder_sets: Iterable[Holders],
        *,
        replicate_inside: bool,
        alone: bool = False,
        refreshes: Iterable[tuple[int, Holders]] = (),
        local_steps: bool = False,
    ) -> Communicators:
        """Create all process groups of the world.

        Every rank must call this with the same arguments. Groups are created in world order,
        because ``use_local_synchronization`` hangs if groups overlap in a cycle. Each list of ranks
        gets only one group, except in ``refreshes``.

        Args:
            mesh: the grid of ranks.
            holder_sets: the holder sets of the placement.
            replicate_inside: whether nothing is sharded (ZeRO stage 0).
            alone: whether FSDP2 wraps parameters that are not sharded. Then FSDP2 gets a process
                group with only this rank.
            refreshes: for each message of frozen copies, the source group and the groups that take
                part.
            local_steps: whether groups take steps on their own (``sdp.sync``).
        """
        self = cls(mesh, dist.get_rank(), replicate_inside)
        at = mesh.coordinates(self.rank)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(mesh.world_size)): dist.group.WORLD}  # type: ignore[dict-item]
        if local_steps:  # control messages use the group of the world, so that they do not wait for averages
            made.clear()

        def group_of(ranks: list[int]) -> dist.ProcessGroup:
            key = tuple(ranks)
            if key not in made:
                made[key] = new_group(ranks, backend=_backend())
            return made[key]

        shards_state = not replicate_inside and mesh.fsdp > 1
        if shards_state:
            for group in mesh.groups:
                for tp in range(mesh.tp):
                    made_group = group_of(mesh.ranks_of(group)[tp :: mesh.tp])
                    if (group, tp) == (at.sdp, at.tp):
                        self.fsdp = made_group
        if alone:
            self.fsdp = new_group([self.rank], backend=_backend(), use_local_synchronization=True)
        together = mesh.alone is None  # otherwise the other groups have no ranks in this world
        lists = rank_lists(mesh, holder_sets, replicate_inside=replicate_inside) if together else ()
        for holders, ranks in lists:
            made_group = group_of(ranks)
            if self.rank in ranks:
                self.holders[holders] = made_group
        for source, groups in sorted(set(refreshes)) if together else ():
            for ranks in zip(*map(mesh.ranks_of, groups), strict=True):
                holders = new_group(list(ranks), backend=_backend())
                if self.rank in ranks:
                    self.refresh[source, groups] = holders  # type: ignore[assignment]
        if local_steps:
            own_ranks = mesh.ranks_of(at.sdp)
            for sdp in mesh.groups:
                ranks = mesh.ranks_of(sdp)
                for members in [ranks, *([ranks[tp :: mesh.tp] for tp in range(mesh.tp)] if replicate_inside else [])]:
                    if len(members) > 1:
                        group_of(members)
            self.group = made.get(tuple(own_ranks))
            self.replicas = made.get(tuple(own_ranks[at.tp :: mesh.tp])) if replicate_inside else None
        return self

    def fsdp_mesh(self, device_type: str) -> DeviceMesh:
        """Return the 1-D device mesh on which ``fully_shard`` shards this group's state.

        It has only one rank if nothing is sharded.
        """
        assert self.fsdp is not None
        return DeviceMesh.from_group(self.fsdp, device_type, mesh_dim_names=("fsdp",))
