"""Which ranks share a host, and whether tensor parallelism crosses hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an identifier of this running machine.

    It is unique, unlike host names. The host name is the fallback.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def told_apart(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Return, for each rank, a host name that no other machine has. Machines may share a host name.

    Args:
        hosts: for each rank, its host name and :func:`machine_id`.
    """
    machines: dict[str, list[str]] = {}
    for name, machine in hosts:
        known = machines.setdefault(name, [])
        known += [machine] if machine not in known else []
    return [
        name if len(machines[name]) == 1 else f"{name} ({machines[name].index(machine) + 1})" for name, machine in hosts
    ]


def split_tensor_group(hosts: Sequence[str], tp: int) -> str | None:
    """Describe in one line the first tensor-parallel group that is on several hosts.

    Return None if there is no such group.

    Args:
        hosts: the host of each rank.
        tp: the number of neighbouring ranks in a tensor-parallel group.
    """
    for first in range(0, len(hosts), tp):
        if len(here := list(dict.fromkeys(hosts[first : first + tp]))) > 1:
            return (
                f"tensor parallelism of {tp} ranks crosses the network: ranks {first} to {first + tp - 1} are on "
                f"{' and '.join(here)}, and wait for each other's activations in every layer, forward and backward; "
                "choose a tensor_parallel.autotp_size that divides the ranks of each host"
            )
    return None
