"""A plan as one HTML page that loads nothing else.

The page shows bars of memory, the map of units and groups, the search of ``--fit``, and every
figure of the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.errors import ConfigError
from ...engine.tracing.ledger import KINDS
from ..shared.files import write_whole
from .fit import Fit
from .result import Forecast
from .tables import describe_nodes, list_collectives, make_table
from .templates import render
from .unit_map import draw_map

_LIGHT = ("#2f5d8a", "#5b9bd5", "#9cc3e6", "#b9a5d6", "#b4b4b4", "#e8a33d", "#5f9e5f")
_DARK = ("#4f87bf", "#7db2e3", "#3f6b93", "#9a86bd", "#808080", "#d8922c", "#6fb06f")


def write_page(
    path: Path,
    columns: Sequence[Forecast],
    world: str,
    notes: Sequence[str],
    memory: float | None,
    fit: Fit | None,
    commands: Mapping[str, str],
) -> None:
    """Write the page of a plan.

    Args:
        path: The file. Its folder is made if it does not exist.
        columns: The plan, then the plans that it is compared with.
        world: How many ranks there are, and why.
        notes: What a reader must know about the figures.
        memory: Bytes of a device, drawn as a dashed line.
        fit: The search for a layout, if there was one.
        commands: The commands that train and plan its result.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _render(columns, world, notes, memory, fit, commands))
    except OSError as error:
        raise ConfigError(f"--html {path}: the page cannot be written ({error.strerror})") from None


def _render(
    columns: Sequence[Forecast],
    world: str,
    notes: Sequence[str],
    memory: float | None,
    fit: Fit | None,
    commands: Mapping[str, str],
) -> str:
    plan = columns[0]
    scale = max([column.worst.trace.peak for column in columns] + ([memory] if memory else []))
    used = [kind for kind in KINDS if any(column.worst.trace.at_peak.get(kind) for column in columns)]
    placement = plan.layout.placement
    return render(
        "page.html.jinja",
        title=f"Plan of {plan.config.model['name']}",
        subtitle=f"{plan.parameters / 1e6:,.2f} M parameters; {world} on {describe_nodes(plan.machine)}",
        light=_variables(_LIGHT),
        dark=_variables(_DARK),
        facts=_facts(plan, memory),
        warnings=plan.warnings,
        bars=[_bar(column, scale) for column in columns],
        limit=memory and {"left": f"{100 * memory / scale:.3f}%", "size": format_bytes(memory)},
        key=[(kind, KINDS.index(kind)) for kind in used],
        reasons=() if fit is None else fit.reasons,
        tried=() if fit is None else fit.trials,
        commands=commands,
        placement=placement.describe() if placement.units else "",
        unit_map=draw_map(placement) if placement.units else "",
        table=make_table(columns),
        collectives=list_collectives(plan).strip(),
        notes=notes,
    )


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--kind{index}:{colour};" for index, colour in enumerate(colours[: len(KINDS)]))


def _facts(plan: Forecast, memory: float | None) -> list[tuple[str, str, str]]:
    """Name, value, and the style of a verdict (empty for the others)."""
    mesh, config, batch, peak = plan.layout.mesh, plan.config, plan.batch, plan.worst.trace.peak
    facts = [
        ("sdp × fsdp × tp", f"{mesh.sdp} × {mesh.fsdp} × {mesh.tp}", ""),
        ("ZeRO stage", str(config.zero_optimization.stage), ""),
        ("precision", config.precision, ""),
        ("activation checkpointing", config.activation_checkpointing.mode, ""),
        ("samples a step", f"{batch.train:,} = {batch.micro} × {batch.accumulation} × {mesh.data_ranks}", ""),
        ("peak of a rank", format_bytes(peak), ""),
        ("expected step", format_seconds(plan.seconds), ""),
    ]
    if memory is not None:
        missing = format_bytes(peak - memory) if peak > memory else ""
        verdict, style = (f"does not fit: {missing} too much", "bad") if missing else ("fits", "good")
        facts.append((f"of {format_bytes(memory)} a device", verdict, style))
    return facts


def _bar(column: Forecast, scale: float) -> dict[str, object]:
    trace = column.worst.trace
    parts = [
        {"width": f"{100 * nbytes / scale:.3f}%", "kind": index, "title": f"{kind}: {format_bytes(nbytes)}"}
        for index, kind in enumerate(KINDS)
        if (nbytes := trace.at_peak.get(kind, 0))
    ]
    return {"name": column.name, "parts": parts, "size": format_bytes(trace.peak)}
