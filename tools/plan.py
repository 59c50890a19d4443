"""``sdp plan``: memory, computation, traffic and time of a run on any machines, before anything is started."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.config.load import load_config
from ..engine.config.schema import Config
from ..engine.errors import ConfigError
from ..engine.tracing.operators import DEVICES, device_here
from ..launcher.cluster.hosts import read_hostfile
from .fit import Fit, find_fit
from .forecast import Forecast, alternatives, forecast
from .machine import LINKS, Machine, default_world, evenly, filled
from .plan_command import fit_command, plan_command, train_command
from .plan_page import page
from .runs.run_config import with_initial_model
from .shared.files import write_whole
from .shared.quantities import decimal, quantity
from .shared.table import Row, Table, bytes_row, plain_row, text_row

PEAK_FLOPS, ACHIEVED, INSIDE, BETWEEN = "989TFLOP/s", 0.4, "450GB/s", "50GB/s"
PER_NODE = 8
_DEVICES = {"cpu": "a CPU's operators (--device cuda: of a GPU's)", "cuda": "a GPU's operators (--device cpu: of a CPU's)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the JSON file of the run")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override a key of CONFIG; may be repeated")
    parser.add_argument("--world", type=int, metavar="N", help="ranks (default: the hostfile's, else as few as CONFIG means)")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="nodes and their slots, in DeepSpeed's format")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help=f"ranks of a node (default: {PER_NODE})")
    parser.add_argument("--device", choices=DEVICES, help="whose operators to trace (default: cuda where torch finds a GPU here, else cpu)")
    parser.add_argument(
        "--device-memory", metavar="BYTES", help="of a device, as 80GB or 80GiB: say whether the run fits (exit code 2: not)"
    )
    parser.add_argument("--fit", action="store_true", help="with --device-memory: find the smallest layout that fits, and plan that")
    parser.add_argument("--peak-flops", metavar="RATE", help=f"of a device (default: {PEAK_FLOPS}, an H100 in bfloat16)")
    parser.add_argument("--achieved", type=float, metavar="FRACTION", help=f"of that (default: {ACHIEVED})")
    rates = "in bytes or bits a second, as 50GB/s or 400Gbit"
    parser.add_argument("--intra-node", metavar="RATE", help=f"that a rank sends inside a node, {rates} (default: {INSIDE})")
    parser.add_argument("--inter-node", metavar="RATE", help=f"that a rank sends between nodes (default: {BETWEEN})")
    parser.add_argument("--alone", action="store_true", help="leave out DDP, FSDP and HSDP of the dense model")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with the map of units and bars of memory")
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
        _write_page(args.html, [plan, *others], _notes(plan, others) + notes, f"{world} ranks ({source})", memory, fit, commands)
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
        if args.html is not None and path is not None and args.html.exists() and path.exists() and args.html.samefile(path):
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
            f"{args.config}: does not fit: the peak of rank {plan.worst.trace.rank} is {decimal(peak)}, {decimal(peak - memory)} more than "
            f"the {decimal(memory)} of a device; {fit_command(args)} looks for a layout that does"
        )
    if not args.json:
        known = ", as far as groups were traced" if plan.untraced else ""
        print(f"\nIt fits{known}: of {decimal(memory)} a device {decimal(memory - peak)} are left for the device's own context, libraries' "
              "workspaces, the communication library's buffers and fragmentation.")  # fmt: skip


def _report_of_fit(fit: Fit | None, commands: dict[str, str]) -> dict[str, Any]:
    return {} if fit is None else {"tried": list(map(str, fit.trials)), "reasons": list(fit.reasons), "commands": commands}


def _report(plan: Forecast, others: list[Forecast], notes: list[str], world: int, memory: float | None) -> dict[str, Any]:
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


def _print(plan: Forecast, others: list[Forecast], notes: list[str], world: str) -> None:
    config, layout = plan.config, plan.layout
    machine = plan.machine
    nodes = f"{len(machine.slots)} node{'s' * (len(machine.slots) > 1)} of up to {max(machine.slots)}"
    parameters = sum(info.numel for info in layout.parameters.values()) / 1e6
    print(f"{config.model['name']}, {parameters:,.2f} M parameters, {config.precision}; {world} on {nodes}")
    print(f"{plan.batch.train:,} samples a step = micro-batch {plan.batch.micro} × accumulation {plan.batch.accumulation} × "
          f"{layout.mesh.data_ranks} data ranks; activation checkpointing: {config.activation_checkpointing.mode}")  # fmt: skip
    if layout.units and layout.mesh.sdp > 1:
        print(f"placement: {layout.placement.describe()}")
    for warning in plan.warnings:
        print(f"warning: {warning}")
    print()
    print(_table([plan, *others]).without_empty().text())
    print()
    print(_collectives(plan))
    for line in [*_notes(plan, others), *notes]:
        print(f"- {line}")


def _write_page(
    path: Path, columns: list[Forecast], notes: list[str], world: str, memory: float | None, fit: Fit | None, commands: dict[str, str]
) -> None:
    plan = columns[0]
    machine = plan.machine
    parameters = sum(info.numel for info in plan.layout.parameters.values()) / 1e6
    nodes = f"{len(machine.slots)} node{'s' * (len(machine.slots) > 1)} of up to {max(machine.slots)}"
    found: dict[str, Any] = {} if fit is None else {"reasons": fit.reasons, "tried": list(map(str, fit.trials)), "commands": commands}
    table = _table(columns).without_empty()
    text = page(columns, table, _collectives(plan), f"{parameters:,.2f} M parameters; {world} on {nodes}", notes, memory, **found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"--html {path}: the page cannot be written ({error.strerror})") from None


def _table(columns: list[Forecast]) -> Table:
    worst = [column.worst for column in columns]
    states = [group.trace.state for group in worst]
    peak = next((column.worst.trace.peak for column in columns if column.name == "DDP"), None)
    slowest = [column.slowest for column in columns]
    sent = [column.sent_at_most for column in columns]
    flops = [max(group.trace.flops for group in column.groups) for column in columns]
    in_bytes = partial(bytes_row, decimal=True)
    rows = [
        text_row("sdp × fsdp × tp", [f"{c.layout.mesh.sdp} × {c.layout.mesh.fsdp} × {c.layout.mesh.tp}" for c in columns]),
        text_row("ZeRO stage", [str(column.config.zero_optimization.stage) for column in columns]),
        Row("memory of the rank that needs most"),
        *(in_bytes(kind, [getattr(state, kind) for state in states]) for kind in ("parameters", "gradients", "optimizer")),
        in_bytes("frozen copies", [state.frozen or None for state in states]),
        in_bytes("activations, at most", [group.trace.activations for group in worst]),
        in_bytes("communication buffers, at most", [group.trace.communication or None for group in worst]),
        in_bytes("peak", [group.trace.peak for group in worst], peak),
        Row("a rank in a step, at most"),
        plain_row("TFLOP, recomputation included", [each / 1e12 for each in flops], ",.4g"),
        *(in_bytes(f"sent {link}", [of[link] for of in sent]) for link in LINKS),
        plain_row("communicators", [max(rank.communicators for rank in column.ranks) for column in columns], "d"),
        Row("expected seconds of a step"),
        plain_row("computation", [rank.time.compute for rank in slowest], ".4g"),
        plain_row("tensor parallel, never hidden", [rank.time.tensor_parallel or None for rank in slowest], ".3g"),
        plain_row("inside groups, before hiding", [rank.time.inside or None for rank in slowest], ".3g"),
        plain_row("between groups or replicas, before hiding", [rank.time.between or None for rank in slowest], ".3g"),
        plain_row("frozen copies, before hiding", [rank.time.refresh or None for rank in slowest], ".3g"),
        plain_row("step, slowest rank", [column.seconds for column in columns], ".4g"),
        plain_row(_speed(columns[0]), [column.samples_per_second * column.config.data.tokens_per_sample for column in columns], ",.0f"),
    ]
    return Table([column.name for column in columns], rows)


def _speed(plan: Forecast) -> str:
    return "tokens/s" if plan.config.data.name is None else "images/s"


def _collectives(plan: Forecast) -> str:
    """What the slowest rank sends in a step, by collective."""
    sent = Counter[Any]()
    for one in plan.slowest.collectives:
        sent[one.scope, one.kind, len(one.ranks), plan.machine.link(one.ranks)] += one.sent  # type: ignore[assignment]
    said = {"between groups": "between replicas"} if plan.layout.mesh.sdp == 1 else {}
    rows = [
        Row(
            f"  {said.get(scope, scope)}: {kind.replace('_', '-')} of {ranks} ranks, {link}",
            bytes_row("", [nbytes], decimal=True).cells,
        )
        for (scope, kind, ranks, link), nbytes in sent.items()
    ]
    if not rows:
        return "nothing is sent\n"
    return Table([""], [Row(f"sent by rank {plan.slowest.rank}, the slowest, in a step"), *rows]).text() + "\n"


def _notes(plan: Forecast, others: list[Forecast]) -> list[str]:
    machine = plan.machine
    trace = plan.worst.trace
    inside, between = machine.inside / 1e9, machine.between / 1e9
    of_another_type = plan.config.precision == "float32" and machine.flops == quantity(PEAK_FLOPS, "FLOP/s", "--peak-flops")
    notes = [
        f"Speeds as stated, not measured, and no latencies: {machine.flops / 1e12:,.0f} TFLOP/s a device, {machine.achieved:.0%} of it "
        f"achieved; a rank sends {inside:,.4g} GB/s inside a node, {between:,.4g} GB/s between nodes."
        + " The rate of a device is an H100's in bfloat16, and this run computes in float32: say --peak-flops."
        * of_another_type,
        f"Memory is that of tensors of {_DEVICES[machine.device]}; a device's context, libraries' workspaces, the communication library's "
        "buffers come on top.",
    ]
    if trace.traced_blocks < trace.blocks:
        notes.append(f"{trace.traced_blocks} of {trace.blocks} blocks were traced; what one more of a pattern adds was multiplied.")
    if plan.config.training.compile:
        notes.append("Blocks are traced as if they were not compiled; compiled ones need less.")
    if len(plan.groups) > 1:
        peaks: dict[str, list[int]] = {}
        for group in plan.groups:
            peaks.setdefault(decimal(group.trace.peak), []).append(group.trace.rank)
        each = (f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {peak}" for peak, ranks in peaks.items())
        notes.append(f"Groups differ; peaks: {'; '.join(each)}.")
    if plan.untraced:
        groups = ", ".join(map(str, plan.untraced))
        notes.append(f"Not traced, and not in these figures: groups {groups}, of further kinds.")
    if plan.reordered:
        groups = ", ".join(map(str, plan.reordered))
        notes.append(
            f"Groups {groups} run as much as a traced one in another order, whose peak is given for them; theirs may be some per cent off."
        )
    if any(other.name == "DDP" for other in others):
        notes.append(
            "DDP is planned with gradients that are views of its buckets (gradient_as_bucket_view), which live through the whole step; "
            "without that, and with accumulation, it needs them twice."
        )
        if plan.config.precision != "float32":
            notes.append(
                "DDP's weights, gradients and optimizer state are float32, and its forward passes run under torch.autocast in "
                f"{plan.config.precision}, which keeps cast copies of the weights: these are among its activations."
            )
    return notes
