"""A plan as tables on the terminal and as a page."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError
from ..shared.files import write_whole
from ..shared.quantities import format_bytes, quantity
from ..shared.table import Row, Table, bytes_row, plain_row, text_row
from .fit import Fit
from .forecast import Forecast
from .machine import LINKS, PEAK_FLOPS
from .page import page

_DEVICES = {
    "cpu": "a CPU's operators (--device cuda: of a GPU's)",
    "cuda": "a GPU's operators (--device cpu: of a CPU's)",
}


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
    path: Path,
    columns: list[Forecast],
    notes: list[str],
    world: str,
    memory: float | None,
    fit: Fit | None,
    commands: dict[str, str],
) -> None:
    plan = columns[0]
    machine = plan.machine
    parameters = sum(info.numel for info in plan.layout.parameters.values()) / 1e6
    nodes = f"{len(machine.slots)} node{'s' * (len(machine.slots) > 1)} of up to {max(machine.slots)}"
    found: dict[str, Any] = (
        {} if fit is None else {"reasons": fit.reasons, "tried": list(map(str, fit.trials)), "commands": commands}
    )
    table = _table(columns).without_empty()
    text = page(
        columns,
        table,
        _collectives(plan),
        f"{parameters:,.2f} M parameters; {world} on {nodes}",
        notes,
        memory,
        **found,
    )
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
        text_row(
            "sdp × fsdp × tp", [f"{c.layout.mesh.sdp} × {c.layout.mesh.fsdp} × {c.layout.mesh.tp}" for c in columns]
        ),
        text_row("ZeRO stage", [str(column.config.zero_optimization.stage) for column in columns]),
        Row("memory of the rank that needs most"),
        *(
            in_bytes(kind, [getattr(state, kind) for state in states])
            for kind in ("parameters", "gradients", "optimizer")
        ),
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
        plain_row(
            _speed(columns[0]),
            [column.samples_per_second * column.config.data.tokens_per_sample for column in columns],
            ",.0f",
        ),
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
    of_another_type = plan.config.precision == "float32" and machine.flops == quantity(
        PEAK_FLOPS, "FLOP/s", "--peak-flops"
    )
    notes = [
        f"Speeds as stated, not measured, and no latencies: {machine.flops / 1e12:,.0f} TFLOP/s a device, {machine.achieved:.0%} of it "
        f"achieved; a rank sends {inside:,.4g} GB/s inside a node, {between:,.4g} GB/s between nodes."
        + " The rate of a device is an H100's in bfloat16, and this run computes in float32: say --peak-flops."
        * of_another_type,
        f"Memory is that of tensors of {_DEVICES[machine.device]}; a device's context, libraries' workspaces, the communication library's "
        "buffers come on top.",
    ]
    if trace.traced_blocks < trace.blocks:
        notes.append(
            f"{trace.traced_blocks} of {trace.blocks} blocks were traced; what one more of a pattern adds was multiplied."
        )
    if plan.config.training.compile:
        notes.append("Blocks are traced as if they were not compiled; compiled ones need less.")
    if len(plan.groups) > 1:
        peaks: dict[str, list[int]] = {}
        for group in plan.groups:
            peaks.setdefault(format_bytes(group.trace.peak), []).append(group.trace.rank)
        each = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {peak}" for peak, ranks in peaks.items()
        )
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
