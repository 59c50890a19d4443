"""The mesh ``arange(world).view(sdp, fsdp, tp)``: which rank is in which group, and on which host.

This module does not import torch, because the launcher uses it before any process starts.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.schema import Config
from ..errors import ConfigError

Holders = tuple[int, ...]


def passes_on(member: int, source: int, ranks: int) -> bool:
    """Return whether a rank sends anything in a broadcast round a ring: all but the last rank do.

    ``member`` is the rank's position in the ring, and ``source`` is the position of the sender.
    """
    return (member - source) % ranks != ranks - 1


@dataclass(frozen=True)
class Coordinates:
    """The position of a rank in the mesh: SDP group, data rank inside it, tensor-parallel rank."""

    sdp: int
    fsdp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The arrangement of all ranks of a run: ``sdp`` groups, each with ``fsdp × tp`` ranks.

    Ranks are numbered group by group. Inside a group, tensor-parallel ranks have adjacent numbers.

    Attributes:
        sdp: the number of SDP groups.
        fsdp: the number of data ranks per group.
        tp: the number of tensor-parallel ranks per data rank.
        alone: None if all groups are in this torch world. Otherwise each group has a world of its
            own, a service connects the groups, and this is the index of the group in this world.
    """

    sdp: int
    fsdp: int = 1
    tp: int = 1
    alone: int | None = None

    @classmethod
    def for_world(cls, world_size: int, groups: int, tp: int = 1) -> Mesh:
        """Return the mesh of ``groups`` SDP groups in a world of ``world_size`` ranks.

        Raises ConfigError if ``world_size`` is not divisible by ``groups × tp``.
        """
        if world_size % (groups * tp):
            raise ConfigError(
                f"world size {world_size} is not divisible by sdp.groups {groups} × tensor_parallel.autotp_size {tp} "
                f"= {groups * tp}; start a multiple of {groups * tp} processes or change sdp.groups"
            )
        return cls(groups, world_size // (groups * tp), tp)

    @property
    def groups(self) -> range:
        """The indices of the groups whose ranks are in this torch world."""
        return range(self.sdp) if self.alone is None else range(self.alone, self.alone + 1)

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different data."""
        return len(self.groups) * self.fsdp

    def coordinates(self, rank: int) -> Coordinates:
        data_rank, tp = divmod(rank, self.tp)
        index, fsdp = divmod(data_rank, self.fsdp)
        return Coordinates(self.groups[index], fsdp, tp)

    def rank(self, sdp: int, fsdp: int = 0, tp: int = 0) -> int:
        return ((sdp - self.groups[0]) * self.fsdp + fsdp) * self.tp + tp

    def ranks_of(self, group: int) -> list[int]:
        """Return the global ranks of an SDP group."""
        first = self.rank(group)
        return list(range(first, first + self.fsdp * self.tp))

    def neighbours(self, sdp: int, fsdp: int) -> tuple[int, ...]:
        """Return the global ranks among which tensor parallelism cuts matrices, called neighbours.

        They belong to the group ``sdp``, and to the group's data rank ``fsdp``.
        """
        first = self.rank(sdp, fsdp)
        return tuple(range(first, first + self.tp))

    def all_neighbours(self) -> list[tuple[int, ...]]:
        """Return every set of ranks among which tensor parallelism cuts matrices, in rank order."""
        return [tuple(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)]

    def __str__(self) -> str:
        return f"sdp {self.sdp} × fsdp {self.fsdp} × tp {self.tp}"

    def shards(self, stage: int) -> int:
        """Return the number of shards of a group's state under ZeRO ``stage``: 1 at stage 0."""
        return self.fsdp if stage > 0 else 1

    def data_rank(self, rank: int) -> int:
        """Return the index of the share of the data that ``rank`` reads, 0 … ``data_ranks`` − 1.

        Tensor-parallel neighbours read the same data, so they have the same index.
        """
        return rank // self.tp


def mesh_of(config: Config, world_size: int, alone: int | None = None) -> Mesh:
    """Return the mesh of a run with this configuration in a world of ``world_size`` ranks.

    Args:
        world_size: the number of ranks.
        alone: the index of the only group in this world, if a service connects the groups.

    Raises:
        ConfigError: the world size does not fit the groups and the tensor parallelism.
    """
    if alone is not None:
        inside = Mesh.for_world(world_size, 1, config.tensor_parallel.autotp_size)
        return replace(inside, sdp=config.sdp.groups, alone=alone)
    return Mesh.for_world(world_size, config.sdp.groups, config.tensor_parallel.autotp_size)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an identifier that no other machine has, unlike a host name. A reboot changes it.

    The result is the host name if the machine has no such identifier.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def unique_host_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the name of each rank's host. Machines with the same name get a number.

    Args:
        hosts: for each rank, the host name and the :func:`machine_id`.
    """
    machines: dict[str, list[str]] = {}
    for name, machine in hosts:
        known = machines.setdefault(name, [])
        known += [machine] if machine not in known else []
    return [
        name if len(machines[name]) == 1 else f"{name} ({machines[name].index(machine) + 1})" for name, machine in hosts
    ]


def split_tensor_group(hosts: Sequence[str], tp: int) -> str | None:
    """Return a warning if tensor-parallel neighbours are on several hosts, otherwise None.

    Args:
        hosts: the host of each rank.
        tp: the number of neighbouring ranks in a tensor-parallel group.
    """
    for first in range(0, len(hosts), tp):
        if len(crossed := list(dict.fromkeys(hosts[first : first + tp]))) > 1:
            return (
                f"tensor parallelism of {tp} ranks crosses the network: ranks {first} to {first + tp - 1} are on "
                f"{' and '.join(crossed)}, and every layer waits for activations from the other host; choose a "
                "tensor_parallel.autotp_size that divides the number of ranks of each host"
            )
    return None
