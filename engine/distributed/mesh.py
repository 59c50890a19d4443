"""The grid ``arange(world).view(sdp, fsdp, tp)``: the coordinates of every rank.

This module does not import torch, because the launcher uses it before any process starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
        fsdp: data ranks per group.
        tp: tensor-parallel ranks.
    """

    sdp: int
    fsdp: int = 1
    tp: int = 1

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

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data."""
        return self.sdp * self.fsdp

    def data_ranks_of(self, groups: Collection[int]) -> int:
        """Return the number of data ranks of some SDP groups together."""
        return len(groups) * self.fsdp

    def coordinates(self, rank: int) -> Coordinates:
        data_rank, tp = divmod(rank, self.tp)
        return Coordinates(*divmod(data_rank, self.fsdp), tp)

    def rank(self, sdp: int, fsdp: int = 0, tp: int = 0) -> int:
        return (sdp * self.fsdp + fsdp) * self.tp + tp

    def ranks_of(self, group: int) -> list[int]:
        """Return the global ranks of an SDP group."""
        first = self.rank(group)
        return list(range(first, first + self.fsdp * self.tp))

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
        return f"sdp {self.sdp} × fsdp {self.fsdp} × tp {self.tp}"

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

    Raises:
        ConfigError: the world size does not fit the groups and the tensor parallelism.
    """
    return Mesh.for_world(world_size, config.sdp.groups, config.tensor_parallel.autotp_size)
