"""Where other groups reach this rank: on the interface that leads to the coordinator."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import torch.distributed as dist

from ...environment.elastic import COORDINATOR
from ...errors import LaunchError, PeerLostError, shorten

log = logging.getLogger("sdp")

_RETRY_SECONDS = 0.5


def address_towards(coordinator: str, *, seconds: float = 0.0) -> str:
    """Return the address of this host on the interface that reaches the coordinator.

    Args:
        coordinator: the coordinator's host.
        seconds: how long to try, because the run has begun and this host's link may be down.

    Raises:
        LaunchError: this host has no route to it.
        PeerLostError: it had no route to it for so many ``seconds``.
    """
    end, was_said = time.monotonic() + seconds, False
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(coordinator, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as towards:
                towards.connect(address)  # sends nothing
                return towards.getsockname()[0]
        except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
            reason = shorten(getattr(error, "strerror", None) or error, 80)
        what = f"{COORDINATOR}: its host {shorten(coordinator)} cannot be reached"
        if not seconds:
            raise LaunchError(f"{what} ({reason}); name an address that all groups can reach")
        if time.monotonic() > end:
            raise PeerLostError(
                f"{what} for {seconds:g} s ({reason}); look whether this host's link is down and the address right"
            )
        if not was_said:
            log.warning("%s (%s); trying for %g s, because this host's link may be down", what, reason, seconds)
            was_said = True
        time.sleep(_RETRY_SECONDS)


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
