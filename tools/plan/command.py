"""``sdp plan``: memory, computation, traffic and time of a run on any machines, before it
starts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.accounting.quantities import format_bytes
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ..runs.run_config import with_initial_model
from .alternatives import alternatives
from .compare import compare, table, to_json
from .fit import Fit, find_fit
from .forecast import forecast
from .machine import Machine
from .options import PlanOptions, add_arguments
from .page import write_page
from .result import Forecast
from .suggested_commands import fit_command, plan_command, train_command
from .tables import about_machine, assumptions, describe_nodes, print_plan

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class _Result:
    """A plan, what it is compared with, and how it was found.

    ``notes`` name the alternatives that could not be planned. ``world`` says how many ranks there
    are, and why. ``fit`` and ``commands`` are those of ``--fit``, else None and empty.
    """

    plan: Forecast
    others: list[Forecast]
    notes: list[str]
    world: str
    fit: Fit | None
    commands: dict[str, str]


def run(args: argparse.Namespace) -> int:
    """Plan the run, print the plan, and say whether it fits. Raises :class:`ConfigError` if not."""
    options = PlanOptions.from_args(args)
    config = with_initial_model(load_config(options.config, options.settings))
    if options.compare:
        return _compare(options, config)
    _require_other_file(options)
    result = _plan(options, config)
    if options.html is not None:
        notes = assumptions(result.plan, result.others) + result.notes
        columns = [result.plan, *result.others]
        write_page(options.html, columns, result.world, notes, options.memory, result.fit, result.commands)
    if options.json:
        print(json.dumps(_to_json(result, options.memory), indent=2))
    else:
        _print(result)
    if options.memory is not None:
        _require_fit(result.plan, options.memory, options)
    return 0


def _compare(options: PlanOptions, config: Config) -> int:
    """Print the plans of all ways to train, a row each."""
    world, source = options.ranks(config)
    machine, memory = options.machine(world), options.memory
    rows, notes = compare(config, machine, world)
    if options.json:
        report = {"world": world, "machine": machine.to_json(), "rows": to_json(rows, memory), "notes": notes}
        print(json.dumps(report | ({} if memory is None else {"device_memory": memory}), indent=2))
        return 0
    lines = [*about_machine(machine, config), *notes]
    print(f"{world} ranks ({source}) on {describe_nodes(machine)}\n\n{table(rows, memory)}\n")
    print("\n".join(f"- {line}" for line in lines))
    return 0


def _plan(options: PlanOptions, config: Config) -> _Result:
    world, source = options.ranks(config)
    machine = options.machine(world)
    name = "SDP" if config.sdp.groups > 1 else "this run"
    fit, commands = None, {}
    if options.fit:
        assert options.memory is not None
        bounded = options.world is not None or options.hostfile is not None
        fit = find_fit(config, options.memory, options.machine, world, bounded=bounded)
        plan = replace(fit.plan, name=name)
        overrides = fit.choice.overrides()
        commands = {"train": train_command(options, plan, overrides), "plan": plan_command(options, plan, overrides)}
        config, machine, world, source = plan.config, plan.machine, plan.layout.mesh.world_size, "the fewest that fit"
    else:
        plan = forecast(name, config, machine, world)
    others, notes = ([], []) if options.alone else alternatives(config, machine, world)
    if config.masking_schedule.ends:
        plan, phases, note = _other_phases(plan, config, machine, world)
        others, notes = [*phases, *others], [note, *notes]
    return _Result(plan, others, notes, f"{world} ranks ({source})", fit, commands)


def _other_phases(plan: Forecast, config: Config, machine: Machine, world: int) -> tuple[Forecast, list[Forecast], str]:
    """Name ``plan`` after its phase of a schedule of maskings, and plan the other phase.

    Returns:
        The plan, the plan of the other phase, and a sentence about the schedule.
    """
    largest, *others = sorted(config.sdp.maskings)  # "backward" needs the most memory, and comes first
    phases = [forecast(f"{plan.name}, {masking}", config, machine, world, masking=masking) for masking in others]
    note = (
        f"sdp.masking: {config.masking_schedule}. A device needs the peak of {largest} masking. When its phase begins, "
        "all frozen copies are sent once."
    )
    return replace(plan, name=f"{plan.name}, {largest}"), phases, note


def _require_other_file(options: PlanOptions) -> None:
    """Raise :class:`ConfigError` where the page would replace a file that the plan reads."""
    for name, path in (("the configuration", options.config), ("the hostfile", options.hostfile)):
        if options.html is not None and path is not None and _is_same_file(options.html, path):
            raise ConfigError(f"--html {options.html}: is {name}, which the page would replace; name another file")


def _is_same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _print(result: _Result) -> None:
    if result.fit is not None:
        print("\n".join([*(f"tried: {trial}" for trial in result.fit.trials), "", *result.fit.reasons, ""]))
    print_plan(result.plan, result.others, result.notes, result.world)
    if result.commands:
        print(f"\nTo train it: {result.commands['train']}\nTo plan it: {result.commands['plan']}")


def _require_fit(plan: Forecast, memory: float, options: PlanOptions) -> None:
    peak = plan.worst.trace.peak
    if peak > memory:
        raise ConfigError(
            f"{options.config}: does not fit: the peak of rank {plan.worst.trace.rank} is {format_bytes(peak)}, "
            f"{format_bytes(peak - memory)} more than the {format_bytes(memory)} of a device; "
            f"{fit_command(options)} looks for a layout that does"
        )
    if not options.json:
        known = ", as far as groups were traced" if plan.untraced else ""
        print(
            f"\nIt fits{known}: {format_bytes(memory - peak)} of a device's {format_bytes(memory)} are left for the "
            "device's own context, the workspaces of libraries, the communication library's buffers and fragmentation."
        )


def _to_json(result: _Result, memory: float | None) -> dict[str, Any]:
    plan, fit = result.plan, result.fit
    report: dict[str, Any] = {
        "world": plan.layout.mesh.world_size,
        "machine": plan.machine.to_json(),
        "parameters": plan.parameters,
        "plan": plan.to_json(),
        "alternatives": {other.name: other.to_json() for other in result.others},
        "notes": result.notes,
    }
    if memory is not None:
        report |= {"device_memory": memory, "fits": plan.worst.trace.peak <= memory}
    if fit is not None:
        report |= {"tried": list(map(str, fit.trials)), "reasons": list(fit.reasons), "commands": result.commands}
    return report
