"""``sdp plan``: memory, computation, traffic and time of a run on any machines, before anything is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...engine.tracing.operators import DEVICES, device_here
from ...launcher.cluster.hosts import read_hostfile
from ..runs.run_config import with_initial_model
from ..shared.quantities import format_bytes, quantity
from .alternatives import alternatives
from .fit import Fit, find_fit
from .forecast import Forecast, forecast
from .machine import ACHIEVED, BETWEEN, INSIDE, PEAK_FLOPS, Machine, default_world, evenly, filled
from .suggested_commands import fit_command, plan_command, train_command
from .tables import _notes, _print, _write_page

PER_NODE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the JSON file of the run")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a key of CONFIG; may be repeated",
    )
    parser.add_argument(
        "--world", type=int, metavar="N", help="ranks (default: the hostfile's, else as few as CONFIG means)"
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="nodes and their slots, in DeepSpeed's format")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help=f"ranks of a node (default: {PER_NODE})")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="whose operators to trace (default: cuda where torch finds a GPU here, else cpu)",
    )
    parser.add_argument(
        "--device-memory",
        metavar="BYTES",
        help="of a device, as 80GB or 80GiB: say whether the run fits (exit code 2: not)",
    )
    parser.add_argument(
        "--fit", action="store_true", help="with --device-memory: find the smallest layout that fits, and plan that"
    )
    parser.add_argument(
        "--peak-flops", metavar="RATE", help=f"of a device (default: {PEAK_FLOPS}, an H100 in bfloat16)"
    )
    parser.add_argument("--achieved", type=float, metavar="FRACTION", help=f"of that (default: {ACHIEVED})")
    rates = "in bytes or bits a second, as 50GB/s or 400Gbit"
    parser.add_argument(
        "--intra-node", metavar="RATE", help=f"that a rank sends inside a node, {rates} (default: {INSIDE})"
    )
    parser.add_argument("--inter-node", metavar="RATE", help=f"that a rank sends between nodes (default: {BETWEEN})")
    parser.add_argument("--alone", action="store_true", help="leave out DDP, FSDP and HSDP of the dense model")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with the map of units and bars of memory"
    )
    parser.add_argument("--json", action="store_true", help="print every figure as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Plan the run, print the plan, and say whether it fits. Raises :class:`ConfigError` where it does not."""
    config = with_initial_model(load_config(args.config, args.set))
    _require_other_file(args)
    memory = quantity(args.device_memory, "B", "--device-memory") if args.device_memory is not None else None
    if args.fit and memory is None:
        raise ConfigError("--fit: needs --device-memory, for example 80GB")
    world, source = _world(args, config)
    machine = _machine(args, world)
    name, fit, commands = "SDP" if config.sdp.groups > 1 else "this run", None, {}
    if args.fit:
        assert memory is not None
        bounded = args.world is not None or args.hostfile is not None
        fit = find_fit(config, memory, lambda ranks: _machine(args, ranks), world, bounded=bounded)
        plan = replace(fit.plan, name=name)
        config, machine, overrides = plan.config, plan.machine, fit.choice.overrides()
        commands = {"train": train_command(args, plan, overrides), "plan": plan_command(args, plan, overrides)}
        world, source = plan.layout.mesh.world_size, "the fewest that fit"
    else:
        plan = forecast(name, config, machine, world)
    others, notes = ([], []) if args.alone else alternatives(config, machine, world)
    if args.html is not None:
        _write_page(
            args.html, [plan, *others], _notes(plan, others) + notes, f"{world} ranks ({source})", memory, fit, commands
        )
    if args.json:
        print(json.dumps(_report(plan, others, notes, world, memory) | _report_of_fit(fit, commands), indent=2))
    else:
        if fit is not None:
            print("\n".join([*(f"tried: {trial}" for trial in fit.trials), "", *fit.reasons, ""]))
        _print(plan, others, notes, f"{world} ranks ({source})")
        if commands:
            print(f"\nTo train it: {commands['train']}\nTo plan it: {commands['plan']}")
    if memory is not None:
        _require_fit(plan, memory, args)
    return 0


def _world(args: argparse.Namespace, config: Config) -> tuple[int, str]:
    for option, value in (("--world", args.world), ("--gpus-per-node", args.gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: not a positive whole number")
    if args.achieved is not None and not 0 < args.achieved <= 1:
        raise ConfigError(f"--achieved {args.achieved}: expected a fraction above 0, up to 1")
    if args.world is not None:
        return args.world, "--world"
    if args.hostfile is not None:
        return sum(len(host.slots) for host in read_hostfile(args.hostfile)), str(args.hostfile)
    return default_world(config)


def _require_other_file(args: argparse.Namespace) -> None:
    for name, path in (("the configuration", args.config), ("the hostfile", args.hostfile)):
        if (
            args.html is not None
            and path is not None
            and args.html.exists()
            and path.exists()
            and args.html.samefile(path)
        ):
            raise ConfigError(f"--html {args.html}: is {name}, which the page would replace; name another file")


def _machine(args: argparse.Namespace, world: int) -> Machine:
    slots = evenly(world, args.gpus_per_node or PER_NODE)
    if args.hostfile is not None:
        if args.gpus_per_node is not None:
            raise ConfigError("--gpus-per-node: --hostfile says how many slots a node has; give one of them")
        slots = tuple(len(host.slots) for host in read_hostfile(args.hostfile))
        if sum(slots) < world:
            raise ConfigError(f"--world {world}: {args.hostfile} has {sum(slots)} slots")
        slots = filled(slots, world)
    flops = quantity(_stated(args.peak_flops, PEAK_FLOPS), "FLOP/s", "--peak-flops")
    inside = quantity(_stated(args.intra_node, INSIDE), "B/s", "--intra-node")
    between = quantity(_stated(args.inter_node, BETWEEN), "B/s", "--inter-node")
    achieved = ACHIEVED if args.achieved is None else args.achieved
    return Machine(slots, flops, achieved, inside, between, args.device or device_here())


def _stated(given: str | None, default: str) -> str:
    return default if given is None else given


def _require_fit(plan: Forecast, memory: float, args: argparse.Namespace) -> None:
    peak = plan.worst.trace.peak
    if peak > memory:
        raise ConfigError(
            f"{args.config}: does not fit: the peak of rank {plan.worst.trace.rank} is {format_bytes(peak)}, "
            f"{format_bytes(peak - memory)} more than the {format_bytes(memory)} of a device; "
            f"{fit_command(args)} looks for a layout that does"
        )
    if not args.json:
        known = ", as far as groups were traced" if plan.untraced else ""
        print(f"\nIt fits{known}: of {format_bytes(memory)} a device {format_bytes(memory - peak)} are "
              "left for the device's own context, libraries' "
              "workspaces, the communication library's buffers and fragmentation.")  # fmt: skip


def _report_of_fit(fit: Fit | None, commands: dict[str, str]) -> dict[str, Any]:
    return (
        {} if fit is None else {"tried": list(map(str, fit.trials)), "reasons": list(fit.reasons), "commands": commands}
    )


def _report(
    plan: Forecast, others: list[Forecast], notes: list[str], world: int, memory: float | None
) -> dict[str, Any]:
    report = {
        "world": world,
        "machine": plan.machine.to_json(),
        "parameters": sum(info.numel for info in plan.layout.parameters.values()),
        "plan": plan.to_json(),
        "alternatives": {other.name: other.to_json() for other in others},
        "notes": notes,
    }
    return report if memory is None else report | {"device_memory": memory, "fits": plan.worst.trace.peak <= memory}


# -- the table -------------------------------------------------------------------------------------------------------------------
