"""``sdp plan``: predicts memory, computation, traffic and time of a run on any machines."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.accounting.quantities import format_bytes
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...engine.tracing.operators import DEVICES, device_here
from ...launcher.cluster.hosts import read_hostfile
from ..runs.start_files import with_initial_model
from ..shared.arguments import add_config_arguments, positive_int
from ..shared.quantities import quantity
from .fit import Fit, find_fit
from .forecast import Forecast, forecast
from .machine import ACHIEVED, BETWEEN, INSIDE, PEAK_FLOPS, Machine, default_world, fill_nodes
from .tables import about_machine, describe_nodes, describe_plan
from .ways import compare, compare_table, row_json

PER_NODE = 8
MOST_RANKS = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:

    def add_quantity(option: str, unit: Any, metavar: str, default: str | None, text: str) -> None:
        read = lambda value: quantity(value, unit, option)  # noqa: E731
        parser.add_argument(option, type=read, metavar=metavar, default=default, help=text)

    add_config_arguments(parser, "the run's JSON file")
    parser.add_argument(
        "--world",
        type=partial(positive_int, most=MOST_RANKS),
        metavar="N",
        help="number of ranks (default: the slots of the hostfile, else the fewest that CONFIG allows)",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="nodes and their slots, in DeepSpeed's format")
    parser.add_argument(
        "--gpus-per-node", type=partial(positive_int, most=MOST_RANKS), metavar="N",
        help=f"number of ranks on each node (default: {PER_NODE})",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="plan with the operators of this kind of device (default: cuda if torch finds a GPU, else cpu)",
    )
    memory = "memory of a device, such as 80GB or 80GiB, to check whether the run fits (exit code 2 if not)"
    add_quantity("--device-memory", "B", "BYTES", None, memory)
    flops = f"peak rate of a device (default: {PEAK_FLOPS}, an H100 in bfloat16)"
    add_quantity("--peak-flops", "FLOP/s", "RATE", PEAK_FLOPS, flops)
    parser.add_argument(
        "--achieved", type=float, metavar="FRACTION", default=ACHIEVED,
        help=f"fraction of the peak rate that the model reaches (default: {ACHIEVED})",
    )  # fmt: skip
    inside = f"speed of a rank's link inside a node, in bytes or bits per second: 50GB/s, 400Gbit (default: {INSIDE})"
    add_quantity("--intra-node", "B/s", "RATE", INSIDE, inside)
    between = f"speed of a rank's link between nodes (default: {BETWEEN})"
    add_quantity("--inter-node", "B/s", "RATE", BETWEEN, between)
    parser.add_argument(
        "--fit", action="store_true", help="with --device-memory: find the smallest layout that fits, and plan it"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare plans of DDP, FSDP, HSDP, ZeRO-2, a smaller dense model, DiLoCo and SDP",
    )
    parser.add_argument("--json", action="store_true", help="print every figure as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Plan a run and print the plan. Raises :class:`ConfigError` if the run does not fit."""
    _check(args)
    config = with_initial_model(load_config(args.config, args.set))
    slots = tuple(len(host.slots) for host in read_hostfile(args.hostfile)) if args.hostfile is not None else ()
    world, source = _ranks(args, config, slots)
    machine_of = partial(_machine, args, slots)
    if args.compare:
        _compare(args, config, machine_of(world), f"{world} ranks ({source})")
        return 0
    fit, commands, memory = None, {}, args.device_memory
    if args.fit:
        bounded = args.world is not None or args.hostfile is not None
        fit = find_fit(config, memory, machine_of, world, bounded=bounded)
        config, world, source = fit.plan.config, fit.plan.layout.mesh.world_size, "the fewest that fit"
        commands = _commands(args, fit)
    machine = machine_of(world)
    name = "SDP" if config.sdp.groups > 1 else "this run"
    plan = forecast(name, config, machine, world) if fit is None else replace(fit.plan, name=name)
    plans, notes = _phases(plan) if config.masking_schedule.ends else ([plan], [])
    text = describe_plan(plans, notes, f"{world} ranks ({source})")
    if fit is not None:
        tried = (f"tried: {trial}" for trial in fit.trials)
        todo = (f"To {name} it: {command}" for name, command in commands.items())
        text = "\n".join([*tried, "", *fit.reasons, "", text, "", *todo])
    print(json.dumps(_to_json(plans, notes, memory, fit, commands), indent=2) if args.json else text)
    if memory is not None:
        _require_fit(plan, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.achieved <= 1:
        raise ConfigError(f"--achieved {args.achieved}: expected a fraction above 0, up to 1")
    if args.hostfile is not None and args.gpus_per_node is not None:
        raise ConfigError("--gpus-per-node: --hostfile says how many slots a node has; leave one option out")
    if args.fit and args.device_memory is None:
        raise ConfigError("--fit: needs --device-memory, for example 80GB")
    if args.compare and args.fit:
        raise ConfigError("--fit: plans one way to train, and --compare plans many; give one of the two options")


def _ranks(args: argparse.Namespace, config: Config, slots: tuple[int, ...]) -> tuple[int, str]:
    """The number of ranks, and where it comes from.

    Raises :class:`ConfigError` where there are too many.
    """
    if args.world is not None:
        return args.world, "--world"
    world, source = (sum(slots), str(args.hostfile)) if slots else default_world(config)
    if world > MOST_RANKS:
        raise ConfigError(f"{world:,} ranks ({source}): too many; the planner takes up to {MOST_RANKS:,}")
    return world, source


def _machine(args: argparse.Namespace, slots: tuple[int, ...], world: int) -> Machine:
    """The nodes, devices and links that ``world`` ranks run on.

    Raises :class:`ConfigError` where the hostfile has too few ``slots``.
    """
    per_node = args.gpus_per_node or PER_NODE
    slots = slots or (per_node,) * -(-world // per_node)
    if sum(slots) < world:
        raise ConfigError(f"--world {world}: {args.hostfile} has only {sum(slots)} slots")
    device = args.device or device_here()
    return Machine(fill_nodes(slots, world), args.peak_flops, args.achieved, args.intra_node, args.inter_node, device)


def _compare(args: argparse.Namespace, config: Config, machine: Machine, ranks: str) -> None:
    world, memory = sum(machine.slots), args.device_memory
    plans, notes = compare(config, machine, world)
    if args.json:
        rows = {plan.name: row_json(plan, memory) for plan in plans}
        report = {"world": world, "machine": asdict(machine), "rows": rows, "notes": notes}
        print(json.dumps(report | ({} if memory is None else {"device_memory": memory}), indent=2))
        return
    print(f"{ranks} on {describe_nodes(machine)}\n\n{compare_table(plans, memory)}\n")
    print("\n".join(f"- {line}" for line in (about_machine(machine, config), *notes)))


def _phases(plan: Forecast) -> tuple[list[Forecast], list[str]]:
    """Return the plan of each masking of a schedule, and a note.

    ``plan`` is the plan of the masking that needs the most memory. It comes first.
    """
    config, machine, world = plan.config, plan.machine, plan.layout.mesh.world_size
    largest, *others = sorted(config.sdp.maskings)  # "backward" needs the most memory
    phases = [forecast(f"{plan.name}, {masking}", config, machine, world, masking=masking) for masking in others]
    note = (
        f"sdp.masking: {config.masking_schedule}. A device needs the peak of {largest} masking. When a {largest} "
        "phase begins, all frozen copies are sent once."
    )
    return [replace(plan, name=f"{plan.name}, {largest}"), *phases], [note]


def _commands(args: argparse.Namespace, fit: Fit) -> dict[str, str]:
    mesh, overrides = fit.plan.layout.mesh, fit.choice.overrides
    start_here = ["--nproc", str(mesh.world_size)] if len(fit.plan.machine.slots) == 1 else []
    train = ["sdp", "train", str(args.config), "--fsdp", str(mesh.fsdp), *start_here, "--set", *args.set, *overrides]
    given = (word for word in args.argv if word != "--fit")
    plan = ["sdp", *given, "--world", str(mesh.world_size), "--set", *overrides]
    return {"train": shlex.join(train), "plan": shlex.join(plan)}


def _require_fit(plan: Forecast, args: argparse.Namespace) -> None:
    peak, memory = plan.worst.trace.peak, args.device_memory
    if peak > memory:
        raise ConfigError(
            f"{args.config}: does not fit: the peak of rank {plan.worst.trace.rank} is {format_bytes(peak)}, "
            f"{format_bytes(peak - memory)} more than the {format_bytes(memory)} of a device; add --fit to find a "
            "layout that fits"
        )
    if not args.json:
        known = ", as far as groups were traced" if plan.untraced else ""
        print(
            f"\nIt fits{known}: {format_bytes(memory - peak)} of a device's {format_bytes(memory)} are left for the "
            "device's own context, the workspaces of libraries, the communication library's buffers and fragmentation."
        )


def _to_json(
    plans: list[Forecast], notes: list[str], memory: float | None, fit: Fit | None, commands: dict[str, str]
) -> dict[str, Any]:
    plan, *phases = plans
    report: dict[str, Any] = {
        "world": plan.layout.mesh.world_size,
        "machine": asdict(plan.machine),
        "parameters": plan.parameters,
        "plan": plan.to_json(),
        "other_phases": {phase.name: phase.to_json() for phase in phases},
        "notes": notes,
    }
    if memory is not None:
        report |= {"device_memory": memory, "fits": plan.worst.trace.peak <= memory}
    if fit is not None:
        report |= {"tried": list(map(str, fit.trials)), "reasons": list(fit.reasons), "commands": commands}
    return report
