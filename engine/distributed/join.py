"""Join the processes that a launcher started."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..environment.detect import detect, publish
from ..errors import ConfigError
from .rendezvous import serve_store

log = logging.getLogger("sdp")


def join(timeout_seconds: float | None = None) -> torch.device:
    """Join the processes that a launcher started (or be the only one) and choose this rank's device.

    Gloo on a CPU, NCCL on CUDA. ``timeout_seconds``: how long a collective may take (None: torch's default). Does nothing to a
    process group that exists already. Raises LaunchError where the launcher's variables are incomplete.
    """
    cuda = torch.cuda.is_available()
    if dist.is_initialized():  # by the user's own script, which has chosen its device too
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    found = detect()
    device = torch.device("cuda", found.local_rank if found else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if found is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        publish(found)
        timeout = timedelta(seconds=timeout_seconds) if timeout_seconds is not None else None
        store = serve_store(found, timeout or timedelta(minutes=30))
        ranks = {} if store is None else {"store": store, "rank": found.rank, "world_size": found.world_size}
        dist.init_process_group(backend, timeout=timeout, device_id=device if cuda else None, **ranks)
        log.info("rank %d of %d, from the variables of %s", found.rank, found.world_size, found.source)
    return device


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
    """Join the processes that a launcher started, as ``deepspeed.init_distributed``; the device of this rank.

    Rank, world size and master come from the launcher's variables (torchrun, DeepSpeed, MPI or SLURM). ``distributed_port``,
    ``verbose``, ``config`` and ``auto_mpi_discovery`` have nothing left to decide. Raises :class:`ConfigError` for a backend that
    is not this machine's and for ranks given by hand, LaunchError where variables are incomplete.
    """
    expected = "nccl" if torch.cuda.is_available() else "gloo"
    if dist_backend not in (None, expected):
        raise ConfigError(
            f"init_distributed: dist_backend {dist_backend!r} is not this machine's; leave it out, or give {expected!r}"
        )
    if init_method is not None or rank >= 0 or world_size >= 0:
        raise ConfigError(
            "init_distributed: init_method, rank and world_size come from the launcher's variables; leave them out"
        )
    return join(timeout.total_seconds() if timeout is not None else None)
