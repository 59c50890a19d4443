"""Commands that a plan suggests: each states all that the plan depends on, so that it plans or starts the same layout."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from ...launcher.cluster.hosts import Host, read_hostfile
from .forecast import Forecast


def fit_command(args: argparse.Namespace) -> str:
    """``sdp plan`` as it was given, with ``--fit``."""
    return shlex.join(["sdp", "plan", str(args.config), *_settings(args.set, {}), *_given(args, args.world), "--fit"])


def plan_command(args: argparse.Namespace, plan: Forecast, overrides: Mapping[str, object]) -> str:
    """``sdp plan`` of ``plan``, which ``overrides`` made of what was given."""
    world = plan.layout.mesh.world_size
    return shlex.join(["sdp", "plan", str(args.config), *_settings(args.set, overrides), *_given(args, world)])


def train_command(args: argparse.Namespace, plan: Forecast, overrides: Mapping[str, object]) -> str:
    """What starts ``plan``'s ranks: here where they are of one node, by the hostfile, by SLURM where nodes are filled alike; else what
    every rank is to run.
    """
    mesh, slots = plan.layout.mesh, plan.machine.slots
    own = [str(args.config), "--fsdp", str(mesh.fsdp), *_settings(args.set, overrides)]
    if args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
        everything = mesh.world_size == sum(len(host.slots) for host in hosts)
        part = [] if everything else ["--include", _first(hosts, mesh.world_size)]
        return shlex.join(["sdp", "launch", "--launcher", "deepspeed", "--hostfile", str(args.hostfile), *part, *own])
    if len(slots) == 1:
        return shlex.join(["sdp", "train", *own, "--nproc", str(mesh.world_size)])
    if len(set(slots)) == 1:
        nodes = ["--nodes", str(len(slots)), "--gpus-per-node", str(slots[0])]
        return shlex.join(["sdp", "launch", "--launcher", "slurm", *nodes, *own])
    return shlex.join(["sdp", "train", *own]) + f"  (on each of {mesh.world_size} ranks)"


def _given(args: argparse.Namespace, world: int | None) -> list[str]:
    """The options of a plan that were given, with ``world``."""
    named = {
        "--world": world,
        "--hostfile": args.hostfile,
        "--gpus-per-node": args.gpus_per_node,
        "--device": args.device,
        "--device-memory": args.device_memory,
        "--peak-flops": args.peak_flops,
        "--achieved": args.achieved,
        "--intra-node": args.intra_node,
        "--inter-node": args.inter_node,
    }
    words = [word for option, value in named.items() if value is not None for word in (option, str(value))]
    return words + ["--alone"] * args.alone


def _settings(given: Sequence[str], overrides: Mapping[str, object]) -> list[str]:
    """Words of ``--set``: those given that are not overridden, then ``overrides``."""
    kept = [setting for setting in given if setting.partition("=")[0] not in overrides]
    words = [*kept, *(f"{key}={value}" for key, value in overrides.items())]
    return ["--set", *words] if words else []


def _first(hosts: Sequence[Host], ranks: int) -> str:
    """The first ``ranks`` slots, as ``--include`` takes them."""
    parts = []
    for host in hosts:
        taken = host.slots[:ranks]
        ranks -= len(taken)
        if taken:
            parts.append(host.name if taken == host.slots else f"{host.name}:{','.join(map(str, taken))}")
    return "@".join(parts)
