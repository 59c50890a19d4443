"""Where other groups reach this rank: on the interface that leads to the coordinator."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from ...environment.elastic import COORDINATOR
from ...errors import LaunchError, shorten


def address_towards(coordinator: str) -> str:
    """Return the address of this host on the interface that reaches the coordinator.

    Args:
        coordinator: the coordinator's host.

    Raises:
        LaunchError: this host has no route to it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(coordinator, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing
            return towards.getsockname()[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"{COORDINATOR}: its host {shorten(coordinator)} cannot be reached ({shorten(reason, 80)}); name an "
            "address that all groups can reach"
        ) from None


def serve_meeting_store(host: str) -> tuple[Any, str]:
    """Serve a store in which groups may meet.

    Args:
        host: the only address at which it listens.

    Returns:
        The store, which lives as long as the caller keeps it, and its HOST:PORT.
    """
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listening.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, f"{host}:{port}"
