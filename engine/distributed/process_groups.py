"""Creates the process groups of a run."""

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
    """Create a process group whose collectives have the same timeout as those of the world.

    By itself, torch would use its default timeout. The default remains if the backend of the world
    does not show a timeout.

    Args:
        ranks: the global ranks in the group.
        **more: further arguments of ``torch.distributed.new_group``.
    """
    device = torch.device("cuda" if _backend() is not None else "cpu")
    try:
        timeout = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # as for MPI and UCC
        timeout = None
    return dist.new_group(ranks, timeout=timeout, **more)  # type: ignore[return-value]


def tensor_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Create the process group of the ranks that share this rank's matrices in tensor parallelism.

    Every rank must call this. The result is None without tensor parallelism.
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
    """Yield each list of ranks that average gradients together, with the SDP groups of the ranks.

    The order is the same on all ranks. Lists with only one rank are left out.

    Args:
        holder_sets: the holders of each unit. The set of all groups, which hold the shared part, is
            added.
        replicate_inside: whether the ranks of a group are replicas (ZeRO stage 0), which average
            together. Otherwise they have different shards.
    """
    for holders in sorted(set(holder_sets) | {tuple(range(mesh.sdp))}):
        for tp in range(mesh.tp):
            rows = [mesh.ranks_of(group)[tp :: mesh.tp] for group in holders]
            for ranks in [list(chain(*rows))] if replicate_inside else map(list, zip(*rows, strict=True)):
                if len(ranks) > 1:
                    yield holders, ranks


@dataclass
class Communicators:
    """The process groups to which one rank belongs.

    Attributes:
        replicate_inside: whether the ranks of a group are replicas (ZeRO stage 0). Then one
            all-reduce averages over the ranks of all holders.
        fsdp: the ranks that shard this group's state, or only this rank if FSDP2 wraps parameters
            that are not sharded.
        holders: a dict from a set of holders to the ranks that average gradients. A set is missing
            if there is no other rank to average with.
        refresh: a dict from (source group, all groups that take part) to the ranks of a broadcast
            of new weights to frozen copies. Each source has a process group of its own, because
            broadcasts in one process group would run one after the other.
        group: all ranks of this rank's SDP group, only with local steps. None for a single rank.
        replicas: the ranks that average gradients inside this SDP group, only with local steps at
            ZeRO stage 0. None for a single rank.
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
        """Create the process groups of all ranks, and return those of this rank.

        Every rank must call this with the same arguments.

        Args:
            holder_sets: the holders of each unit.
            replicate_inside: whether the ranks of a group are replicas (ZeRO stage 0).
            alone: whether FSDP2 wraps parameters that are not sharded. Then FSDP2 gets a process
                group with only this rank.
            refreshes: for each broadcast of weights to frozen copies, the source group and all
                groups that take part.
            local_steps: whether groups take steps on their own (``sdp.sync``).
        """
        # All ranks create all groups: use_local_synchronization hangs if groups overlap in a cycle.
        # In a fake world there are no other ranks, so only the groups of this rank are created.
        is_fake = dist.get_backend() == "fake"
        self = cls(mesh, dist.get_rank(), replicate_inside)
        at = mesh.coordinates(self.rank)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(mesh.world_size)): dist.group.WORLD}  # type: ignore[dict-item]
        if local_steps:  # control messages use the group of the world, so that they do not wait for averages
            made.clear()

        def group_of(ranks: list[int]) -> dist.ProcessGroup | None:
            key = tuple(ranks)
            if key not in made and not (is_fake and self.rank not in ranks):
                made[key] = new_group(ranks, backend=_backend())
            return made.get(key)

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
                self.holders[holders] = made_group  # type: ignore[assignment]
        for source, groups in sorted(set(refreshes)) if together else ():
            for ranks in zip(*map(mesh.ranks_of, groups), strict=True):
                if not is_fake or self.rank in ranks:
                    made_group = new_group(list(ranks), backend=_backend())
                if self.rank in ranks:
                    self.refresh[source, groups] = made_group  # type: ignore[assignment]
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
        """Return the device mesh for ``fully_shard``: the ranks that shard this group's state."""
        assert self.fsdp is not None
        return DeviceMesh.from_group(self.fsdp, device_type, mesh_dim_names=("fsdp",))
