"""What a DeepSpeed script calls before it has an engine, under DeepSpeed's own names and arguments."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch

from .errors import ConfigError
from .initialize import join


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``, which :func:`sdp.initialize` reads from ``args``; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration, as DeepSpeed names it")
    group.add_argument("--deepspeed", action="store_true", help="accepted as DeepSpeed's scripts have it; sdp is used either way")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="JSON file of DeepSpeed's keys, and a section sdp")
    return parser


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
        raise ConfigError(f"init_distributed: dist_backend {dist_backend!r} is not this machine's; leave it out, or give {expected!r}")
    if init_method is not None or rank >= 0 or world_size >= 0:
        raise ConfigError("init_distributed: init_method, rank and world_size come from the launcher's variables; leave them out")
    return join(timeout.total_seconds() if timeout is not None else None)
