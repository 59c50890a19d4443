"""Joins the processes that a launcher started to one process group.

torch's store would listen on all network interfaces and accept every connection. Rank 0 of SDP
listens only on the master address. In a run on one host, this address is 127.0.0.1.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..environment.detect import (
    LAUNCHERS,
    Environment,
    detect,
    export,
    inherited_socket,
    launcher_serves_store,
    set_default,
)
from ..environment.process import announced, loopback_settings
from ..errors import ConfigError, LaunchError

log = logging.getLogger("sdp")

_PREFIX = "default_pg"  # torch's prefix, because other ranks use this store through env://


def serve_store(found: Environment, timeout: timedelta) -> dist.Store | None:
    """Return the store through which ranks find each other, or None if torch shall make the store.

    Rank 0 serves a store that listens on the master address only.

    Args:
        found: the ranks and addresses that the launcher gave this process.
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
    """The socket from the launcher, unless the ranks have another address."""
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
    """Return a socket on the master address, or None if other ranks could not reach it."""
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
                f"{where}: the port is in use on the host of rank 0; choose another (--master-port or MASTER_PORT)"
            ) from None
        log.warning("rank 0 listens on all interfaces, because it cannot listen on %s alone (%s)", where, error)
        return None


def join(timeout_seconds: float | None = None) -> torch.device:
    """Make the process group of all processes that the launcher started, and choose a device.

    Without a launcher, this process is the only rank. If a process group exists already, it is used
    as it is. The backend is gloo on a CPU and NCCL on CUDA. If all ranks are on this host, gloo and
    NCCL listen on the loopback interface only, unless the user has chosen another interface.

    Args:
        timeout_seconds: how long a collective may take. None means torch's default.

    Returns:
        The device of this rank.

    Raises:
        LaunchError: the launcher's variables are incomplete, or the port of rank 0 is in use.
    """
    cuda = torch.cuda.is_available()
    if dist.is_initialized():  # the script has already done this, and also chosen its device
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    found = detect()
    if found is None or found.local_world_size == found.world_size:
        for name, value in loopback_settings().items():
            set_default(name, value)
    device = torch.device("cuda", found.local_rank if found else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if found is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        export(found.variables())
        timeout = timedelta(seconds=timeout_seconds) if timeout_seconds is not None else None
        with announced(lambda: _missing(found)):
            store = serve_store(found, timeout or timedelta(minutes=30))
            ranks = {} if store is None else {"store": store, "rank": found.rank, "world_size": found.world_size}
            dist.init_process_group(backend, timeout=timeout, device_id=device if cuda else None, **ranks)
        log.info("rank %d of %d, from the variables of %s", found.rank, found.world_size, found.source)
    return device


def _missing(found: Environment) -> str:
    """Describe which ranks ``found`` waits for."""
    launcher = next(launcher for launcher in LAUNCHERS if launcher.source == found.source)
    return (
        f"rank {found.rank} of {found.world_size} ({launcher.rank} of {found.source}) waits at {found.master_addr}:"
        f"{found.master_port} for the other ranks; if none was started, because this is a notebook or a shell, "
        f"unset {', '.join((launcher.rank, *launcher.traces))}; if the run has several pods, start torchrun in each"
    )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> torch.device:
    """Make the process group, for scripts that call ``deepspeed.init_distributed``.

    A script may call this before :func:`sdp.initialize`, which otherwise does the same. Rank, world
    size and master address come from the variables of the launcher (torchrun, DeepSpeed, MPI or
    SLURM). Arguments of DeepSpeed that are not listed below have no effect.

    Args:
        dist_backend: None, or the backend of this machine: "nccl" on CUDA, "gloo" on a CPU.
        timeout: how long a collective may take. None means torch's default.
        init_method: must be None.
        rank: must be negative, because the launcher chooses the rank.
        world_size: must be negative, because the launcher chooses the world size.

    Returns:
        The device of this rank.

    Raises:
        ConfigError: An argument has another value than those above.
        LaunchError: The launcher's variables are incomplete, or the port of rank 0 is in use.
    """
    expected = "nccl" if torch.cuda.is_available() else "gloo"
    if dist_backend not in (None, expected):
        raise ConfigError(
            f"init_distributed: dist_backend {dist_backend!r} is not available on this machine; leave it out, or "
            f"give {expected!r}"
        )
    if init_method is not None or rank >= 0 or world_size >= 0:
        raise ConfigError(
            "init_distributed: init_method, rank and world_size come from the launcher's variables; leave them out"
        )
    return join(timeout.total_seconds() if timeout is not None else None)
