"""The grid ``arange(world).view(sdp, fsdp, tp)`` and the process groups cut out of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import ConfigError

Holders = tuple[int, ...]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the grid."""

    sdp: int
    fsdp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The whole layout of a run: ``sdp`` groups, each of ``fsdp × tp`` ranks; tensor ranks are neighbours, groups outermost.

    ``sizes``: data ranks of every group where these differ, else empty; ``fsdp`` is then the largest, and there is no grid.
    """

    sdp: int
    fsdp: int = 1
    tp: int = 1
    sizes: tuple[int, ...] = ()

    @classmethod
    def for_world(cls, world_size: int, groups: int, tp: int = 1) -> Mesh:
        """The mesh of ``groups`` SDP groups in a world; the fsdp degree is what is left. Raises :class:`ConfigError`."""
        if world_size % (groups * tp):
            raise ConfigError(
                f"world size {world_size} is not divisible by sdp.groups {groups} × tensor_parallel.autotp_size {tp} = {groups * tp}; "
                f"start a multiple of {groups * tp} processes or change sdp.groups"
            )
        return cls(groups, world_size // (groups * tp), tp)

    @classmethod
    def of_groups(cls, sizes: Sequence[int], tp: int = 1) -> Mesh:
        """The mesh of groups with ``sizes`` data ranks each, in the order of their ranks."""
        return cls(len(sizes), max(sizes), tp, tuple(sizes) if len(set(sizes)) > 1 else ())

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data."""
        return sum(self.sizes) if self.sizes else self.sdp * self.fsdp

    @property
    def grid(self) -> torch.Tensor:
        """Global ranks, shape (sdp, fsdp, tp), of groups of equal size."""
        assert not self.sizes
        return torch.arange(self.world_size).view(self.sdp, self.fsdp, self.tp)

    def size(self, group: int) -> int:
        """Data ranks of an SDP group."""
        return self.sizes[group] if self.sizes else self.fsdp

    def data_ranks_of(self, groups: Iterable[int]) -> int:
        """Data ranks of some SDP groups together."""
        return sum(map(self.size, groups))

    def coordinates(self, rank: int) -> Coordinates:
        data_rank, tp = divmod(rank, self.tp)
        if not self.sizes:
            return Coordinates(*divmod(data_rank, self.fsdp), tp)
        group = bisect_right(list(accumulate(self.sizes)), data_rank)
        return Coordinates(group, data_rank - sum(self.sizes[:group]), tp)

    def rank(self, sdp: int, fsdp: int = 0, tp: int = 0) -> int:
        first = sum(self.sizes[:sdp]) if self.sizes else sdp * self.fsdp
        return (first + fsdp) * self.tp + tp

    def ranks_of(self, group: int) -> list[int]:
        """Global ranks of an SDP group."""
        first = self.rank(group)
        return list(range(first, first + self.size(group) * self.tp))

    def __str__(self) -> str:
        fsdp = f"({' + '.join(map(str, self.sizes))})" if self.sizes else self.fsdp
        return f"sdp {self.sdp} × fsdp {fsdp} × tp {self.tp}"

    def shards(self, stage: int) -> int:
        """Ranks among which a group's state is cut under ZeRO ``stage``: at stage 0 it is not."""
        return self.fsdp if stage > 0 else 1

    def data_rank(self, rank: int) -> int:
        """Index of the data that ``rank`` reads, 0 … ``data_ranks`` − 1; tensor ranks read the same."""
        return rank // self.tp


def tensor_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The process group of this rank's tensor-parallel neighbours; None where there are none. Every rank must call this."""
    if mesh.tp == 1:
        return None
    if mesh.tp == mesh.world_size:
        return dist.group.WORLD  # type: ignore[return-value]
    own = None
    for ranks in mesh.grid.view(-1, mesh.tp).tolist():
        group = dist.new_group(ranks, backend=_backend())
        if dist.get_rank() in ranks:
            own = group
    return own  # type: ignore[return-value]


def _backend() -> str | None:
    """Of every group: without it each gets a gloo mesh beside NCCL's. A world without NCCL (a fake one) gives its own kind."""
    return "nccl" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else None


@dataclass
class Communicators:
    """The process groups of one rank.

    ``fsdp``: the ranks among which this group's state is sharded, or this rank alone where FSDP2 wraps what is not sharded.
    ``holders[h]``: the ranks that average a gradient held by the SDP groups ``h``; absent where that is this rank alone. With
    ``replicate_inside`` (ZeRO stage 0) nothing is sharded, and the ranks of a group average among themselves in the same all-reduce.
    ``refresh[s, g]``: the ranks of the groups ``g`` at this rank's place in its own, to which that of the group ``s`` sends frozen copies:
    for each sender another, as what a communicator is given it does one by one, and a link carries both directions at once.
    """

    mesh: Mesh
    rank: int
    replicate_inside: bool
    fsdp: dist.ProcessGroup | None = None
    holders: dict[Holders, dist.ProcessGroup] = field(default_factory=dict)
    refresh: dict[tuple[int, Holders], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        holder_sets: Iterable[Holders],
        *,
        replicate_inside: bool,
        alone: bool = False,
        refreshes: Iterable[tuple[int, Holders]] = (),
    ) -> Communicators:
        """Create all groups of the world; every rank must call this with the same arguments.

        Groups are created in world order (``use_local_synchronization`` hangs on cyclic overlaps), equal rank lists once but
        for ``refreshes``.
        ``alone``: FSDP2 wraps parameters that are not sharded, on a process group of this rank alone, which overlaps no other.
        """
        self = cls(mesh, dist.get_rank(), replicate_inside)
        at = mesh.coordinates(self.rank)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(mesh.world_size)): dist.group.WORLD}  # type: ignore[dict-item]

        def group_of(ranks: list[int]) -> dist.ProcessGroup:
            key = tuple(ranks)
            if key not in made:
                made[key] = dist.new_group(ranks, backend=_backend())  # type: ignore[assignment]
            return made[key]

        shards_state = not replicate_inside and mesh.fsdp > 1
        if shards_state:
            for group in range(mesh.sdp):
                for tp in range(mesh.tp):
                    made_group = group_of(mesh.ranks_of(group)[tp :: mesh.tp])
                    if (group, tp) == (at.sdp, at.tp):
                        self.fsdp = made_group
        if alone:
            self.fsdp = dist.new_group([self.rank], backend=_backend(), use_local_synchronization=True)  # type: ignore[assignment]
        for holders in sorted(set(holder_sets) | {tuple(range(mesh.sdp))}):
            for tp in range(mesh.tp):
                rows = [mesh.ranks_of(group)[tp :: mesh.tp] for group in holders]
                for ranks in [list(chain(*rows))] if replicate_inside else map(list, zip(*rows, strict=True)):
                    if len(ranks) > 1:
                        made_group = group_of(ranks)
                        if self.rank in ranks:
                            self.holders[holders] = made_group
        for source, groups in sorted(set(refreshes)):
            for ranks in zip(*map(mesh.ranks_of, groups), strict=True):
                own = dist.new_group(list(ranks), backend=_backend())
                if self.rank in ranks:
                    self.refresh[source, groups] = own  # type: ignore[assignment]
        return self

    def fsdp_mesh(self, device_type: str) -> DeviceMesh:
        """The 1-D device mesh on which ``fully_shard`` shards this group's state; one rank alone where nothing is sharded."""
        assert self.fsdp is not None
        return DeviceMesh.from_group(self.fsdp, device_type, mesh_dim_names=("fsdp",))
