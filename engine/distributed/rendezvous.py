"""The store through which ranks find each other, served on one address only.

torch's own store listens on all interfaces, and accepts whoever connects. Here rank 0 listens on
the address that the ranks were given. In a run on one host that is 127.0.0.1.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from datetime import timedelta

import torch.distributed as dist

from ..environment.detect import Environment
from ..environment.supervision import inherited_socket, launcher_serves_store
from ..errors import LaunchError

log = logging.getLogger(__name__)

_PREFIX = "default_pg"  # torch's own prefix: other ranks come to this store through env://


def serve_store(found: Environment, timeout: timedelta) -> dist.Store | None:
    """The store of this rank, or None if torch makes it by ``env://``.

    Args:
        found: what the launcher told this process.
        timeout: how long rank 0 waits for the other ranks.

    Raises:
        LaunchError: the port is in use.
    """
    if found.world_size == 1:
        return dist.HashStore()
    if found.rank != 0 or launcher_serves_store():
        return None
    listening = _inherited(found) or _bound(found)
    if listening is None:
        return None
    store = dist.TCPStore(
        found.master_addr,
        found.master_port,
        found.world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )
    return dist.PrefixStore(_PREFIX, store)


def _inherited(found: Environment) -> socket.socket | None:
    """The socket that the launcher handed over, unless the ranks were given another address
    since.
    """
    handle = inherited_socket()
    if handle is None:
        return None
    listening = socket.socket(fileno=handle)
    listening.set_inheritable(False)
    if listening.getsockname()[:2] != (found.master_addr, found.master_port):
        listening.close()
        return None
    return listening


def _bound(found: Environment) -> socket.socket | None:
    """A socket on the master address, or None if that cannot be the address of rank 0 for all
    ranks.
    """
    where = f"{found.master_addr}:{found.master_port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            found.master_addr, found.master_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # A host may resolve its own name to a loopback address, which other hosts cannot reach.
        if found.local_world_size != found.world_size and ipaddress.ip_address(address[0]).is_loopback:
            log.warning(
                "rank 0 listens on all interfaces, because its host resolves %s to %s; set MASTER_ADDR to an address"
                " that the other hosts can reach",
                found.master_addr,
                address[0],
            )
            return None
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"{where}: the port is in use on the host of rank 0; choose another (--master-port, or MASTER_PORT)"
            ) from None
        log.warning("rank 0 listens on all interfaces, because it cannot listen on %s alone (%s)", where, error)
        return None
