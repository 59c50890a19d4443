"""Elastic groups on hosts in network namespaces, which lose their links or their power."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .hosts import Hosts
from .lost_at import SECONDS, SeparateGroups
from .moments import Stop

_CLONE_NEWNET = 0x40000000
COORDINATOR_HOST = "v"


class GroupsOnHosts(SeparateGroups):
    """A coordinator and a launch for each group, on several hosts that have the same files.

    Args:
        hosts: the hosts.
        of_groups: the letter of each group's host.
        folder, config, ranks, stops: see :class:`SeparateGroups`.
    """

    def __init__(
        self, hosts: Hosts, of_groups: str, folder: Path, config: dict[str, Any], ranks: int, stops: Sequence[Stop]
    ):
        self._hosts, self._of_groups = hosts, of_groups
        self.address = hosts.address(COORDINATOR_HOST)
        super().__init__(folder, config, ranks, stops)

    def _there(self, group: int | None, prepare: Callable[[], object]) -> Callable[[], object]:
        host = COORDINATOR_HOST if group is None else self._of_groups[group]
        return partial(_enter, self._hosts.network(host), prepare)

    def cut_link(self, stop: Stop) -> str:
        """Cut the link of the host of the groups that have stopped, and let them go on there.

        Return the host.
        """
        (host,) = {self._of_groups[group] for group in stop.groups}
        self._hosts.plug(host, "down")
        self._lost |= set(stop.groups)
        stop.go_on()
        return host

    def cut_power(self, stop: Stop) -> str:
        """Let everything on the host of the groups that have stopped vanish, and nobody is told.

        Return the host.
        """
        (host,) = {self._of_groups[group] for group in stop.groups}
        self._hosts.plug(host, "down")
        self.lose_host(stop)
        return host

    def restore_link(self, host: str, stop: Stop) -> None:
        """Restore a host's link when the others have gone on. Its groups must notice, and end."""
        self.wait_until(lambda: all(f"group {group} on " in self._losses() for group in stop.groups))
        self._hosts.plug(host, "up")
        for group in stop.groups:
            assert self._launches[group].wait(SECONDS) not in {0, -signal.SIGKILL}, self.said

    def _losses(self) -> str:
        return "\n".join(line for line in self.said.splitlines() if " was lost after step" in line)


def _enter(network: Path, prepare: Callable[[], object]) -> None:
    """Let this process be in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {os.fspath(network)}")
    prepare()
