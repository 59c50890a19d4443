"""The grid ``arange(world).view(sdp, fsdp, tp)``: the coordinates of every rank.

This module does not import torch, because the launcher uses it before any process starts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..config.schema import Config
from ..errors import ConfigError

Holders = tuple[int, ...]


@dataclass(frozen=True)
class Coordinates:
    """The position of a rank in the grid."""

    sdp: int
    fsdp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The arrangement of all ranks of a run: ``sdp`` groups, each with ``fsdp × tp`` ranks.

    Tensor-parallel ranks are neighbours. SDP groups are the outermost dimension.

    Attributes:
        sdp: number of SDP groups.
        fsdp: data ranks per group. If groups differ in size, the largest number.
        tp: tensor-parallel ranks.
        sizes: data ranks of every group if groups differ in size, else empty. If it is not empty,
            the ranks do not form a grid.
    """

    sdp: int
    fsdp: int = 1
    tp: int = 1
    sizes: tuple[int, ...] = ()

    @classmethod
    def for_world(cls, world_size: int, groups: int, tp: int = 1) -> Mesh:
        """Return the mesh of ``groups`` SDP groups in a world of ``world_size`` ranks.

        The fsdp degree is the quotient of ``world_size`` and ``groups × tp``.

        Raises:
            ConfigError: ``world_size`` is not divisible by ``groups × tp``.
        """
        if world_size % (groups * tp):
            raise ConfigError(
                f"world size {world_size} is not divisible by sdp.groups {groups} × tensor_parallel.autotp_size {tp} "
                f"= {groups * tp}; start a multiple of {groups * tp} processes or change sdp.groups"
            )
        return cls(groups, world_size // (groups * tp), tp)

    @classmethod
    def of_groups(cls, sizes: Sequence[int], tp: int = 1) -> Mesh:
        """Return the mesh of groups with ``sizes`` data ranks each, in the order of their ranks."""
        return cls(len(sizes), max(sizes), tp, tuple(sizes) if len(set(sizes)) > 1 else ())

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data."""
        return sum(self.sizes) if self.sizes else self.sdp * self.fsdp

    def size(self, group: int) -> int:
        """Return the number of data ranks of an SDP group."""
        return self.sizes[group] if self.sizes else self.fsdp

    def data_ranks_of(self, groups: Iterable[int]) -> int:
        """Return the number of data ranks of some SDP groups together."""
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
        """Return the global ranks of an SDP group."""
        first = self.rank(group)
        return list(range(first, first + self.size(group) * self.tp))

    def neighbours(self, sdp: int, fsdp: int) -> tuple[int, ...]:
        """Return the global ranks at one position in a group.

        These ranks share matrices under tensor parallelism.
        """
        first = self.rank(sdp, fsdp)
        return tuple(range(first, first + self.tp))

    def all_neighbours(self) -> list[tuple[int, ...]]:
        """Return the neighbours at every position, in the order of their ranks."""
        return [tuple(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)]

    def __str__(self) -> str:
        fsdp = f"({' + '.join(map(str, self.sizes))})" if self.sizes else self.fsdp
        return f"sdp {self.sdp} × fsdp {fsdp} × tp {self.tp}"

    def shards(self, stage: int) -> int:
        """Return the number of ranks among which ZeRO ``stage`` shards a group's state.

        Stage 0 does not shard it.
        """
        return self.fsdp if stage > 0 else 1

    def data_rank(self, rank: int) -> int:
        """Return the index of the data that ``rank`` reads, 0 … ``data_ranks`` − 1.

        All tensor-parallel ranks at one position read the same data.
        """
        return rank // self.tp


def mesh_of(config: Config, world_size: int) -> Mesh:
    """Return the mesh of a run in ``world_size`` processes.

    In the reference backend the ranks are virtual, and matrices are whole.

    Raises:
        ConfigError: the world size does not fit the groups and the tensor parallelism.
    """
    sizes, alone = config.sdp.group_sizes, config.sdp.in_one_process
    if sizes is not None:
        mesh = Mesh.of_groups(sizes, 1 if alone else config.tensor_parallel.autotp_size)
        if not alone and mesh.world_size != world_size:
            raise ConfigError(f"world size {world_size} is not sdp.group_sizes {sizes} × tensor_parallel.autotp_size "
                              f"{mesh.tp} = {mesh.world_size}; start {mesh.world_size} processes, or change "
                              "sdp.group_sizes")  # fmt: skip
        return mesh
    if alone:
        return Mesh(config.sdp.groups, _virtual_fsdp(config))
    return Mesh.for_world(world_size, config.sdp.groups, config.tensor_parallel.autotp_size)


def _virtual_fsdp(config: Config) -> int:
    """Return the ranks per group in the reference backend, which has no world to divide.

    The number follows from the batch sizes if all of them are given. Otherwise it is 1.
    """
    train, micro, accumulation = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if train is None or micro is None or accumulation is None:
        return 1
    return max(1, train // (micro * accumulation * config.sdp.groups))
