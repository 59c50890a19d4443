"""Commands that a plan suggests.

Each command states everything that the plan depends on, so that it plans or starts the same layout.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ...launcher.cluster.hosts import Host, read_hostfile
from .options import PlanOptions
from .result import Forecast


def fit_command(options: PlanOptions) -> str:
    """Return ``sdp plan`` with the options that were given, and ``--fit``."""
    given = [*_settings(options.settings, {}), *_given(options, options.world)]
    return shlex.join(["sdp", "plan", str(options.config), *given, "--fit"])


def plan_command(options: PlanOptions, plan: Forecast, overrides: Mapping[str, object]) -> str:
    """Return the ``sdp plan`` that plans ``plan`` again.

    ``overrides`` are the settings of ``--fit``.
    """
    given = [*_settings(options.settings, overrides), *_given(options, plan.layout.mesh.world_size)]
    return shlex.join(["sdp", "plan", str(options.config), *given])


def train_command(options: PlanOptions, plan: Forecast, overrides: Mapping[str, object]) -> str:
    """Return the command that starts the ranks of ``plan``.

    With a hostfile the command starts them on its hosts. Otherwise it starts the ranks of one node
    here, and those of equally filled nodes through SLURM. For other nodes it returns what every
    rank must run.
    """
    mesh, slots = plan.layout.mesh, plan.machine.slots
    words = [str(options.config), "--fsdp", str(mesh.fsdp), *_settings(options.settings, overrides)]
    if options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
        uses_all = mesh.world_size == sum(len(host.slots) for host in hosts)
        part = [] if uses_all else ["--include", _first_slots(hosts, mesh.world_size)]
        start = ["sdp", "launch", "--launcher", "deepspeed", "--hostfile", str(options.hostfile)]
        return shlex.join([*start, *part, *words])
    if len(slots) == 1:
        return shlex.join(["sdp", "train", *words, "--nproc", str(mesh.world_size)])
    if len(set(slots)) == 1:
        nodes = ["--nodes", str(len(slots)), "--gpus-per-node", str(slots[0])]
        return shlex.join(["sdp", "launch", "--launcher", "slurm", *nodes, *words])
    return shlex.join(["sdp", "train", *words]) + f"  (on each of {mesh.world_size} ranks)"


def _given(options: PlanOptions, world: int | None) -> list[str]:
    """The options that were given, with ``world`` for the number of ranks."""
    named = {
        "--world": world,
        "--hostfile": options.hostfile,
        "--gpus-per-node": options.gpus_per_node,
        "--device": options.device,
        "--device-memory": options.device_memory,
        "--peak-flops": options.peak_flops,
        "--achieved": options.achieved,
        "--intra-node": options.intra_node,
        "--inter-node": options.inter_node,
    }
    words = [word for option, value in named.items() if value is not None for word in (option, str(value))]
    return words + ["--alone"] * options.alone


def _settings(given: Sequence[str], overrides: Mapping[str, object]) -> list[str]:
    """The words of ``--set``: the given ones that are not overridden, then ``overrides``."""
    kept = [setting for setting in given if setting.partition("=")[0] not in overrides]
    words = [*kept, *(f"{key}={value}" for key, value in overrides.items())]
    return ["--set", *words] if words else []


def _first_slots(hosts: Sequence[Host], ranks: int) -> str:
    """The first ``ranks`` slots, in the form of ``--include``."""
    parts = []
    for host in hosts:
        taken = host.slots[:ranks]
        ranks -= len(taken)
        if taken:
            parts.append(host.name if taken == host.slots else f"{host.name}:{','.join(map(str, taken))}")
    return "@".join(parts)
