"""A plan as tables on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...engine.accounting.quantities import format_bytes, format_flops, format_rate, format_seconds
from ...engine.config.schema import Config
from ...engine.tracing.messages import Messages
from ..shared.quantities import quantity
from ..shared.table import Row, Table, bytes_row, plain_row, text_row
from .machine import LINKS, PEAK_FLOPS, Machine
from .result import Forecast

_DEVICES = {
    "cpu": "a CPU's operators (--device cuda: of a GPU's)",
    "cuda": "a GPU's operators (--device cpu: of a CPU's)",
}


def print_plan(plan: Forecast, others: Sequence[Forecast], notes: Sequence[str], world: str) -> None:
    """Print a plan next to its alternatives.

    Args:
        plan: The plan of the run.
        others: Plans that it is compared with, a column each.
        notes: Further notes, after the assumptions.
        world: How many ranks there are, and why.
    """
    config, layout, batch = plan.config, plan.layout, plan.batch
    print(
        f"{config.model['name']}, {plan.parameters / 1e6:,.2f} M parameters, {config.precision}; "
        f"{world} on {describe_nodes(plan.machine)}"
    )
    print(
        f"{batch.train:,} samples a step = micro-batch {batch.micro} × accumulation {batch.accumulation} × "
        f"{layout.mesh.data_ranks} data ranks; activation checkpointing: {config.activation_checkpointing.mode}"
    )
    if layout.units and layout.mesh.sdp > 1:
        print(f"placement: {layout.placement.describe()}")
    for warning in plan.warnings:
        print(f"warning: {warning}")
    print()
    print(make_table([plan, *others]).text())
    print()
    print(list_collectives(plan))
    for line in [*assumptions(plan, others), *notes]:
        print(f"- {line}")


def describe_nodes(machine: Machine) -> str:
    """Say how many nodes there are, and how many ranks they have."""
    return f"{len(machine.slots)} node{'s' * (len(machine.slots) > 1)} of up to {max(machine.slots)}"


def make_table(columns: Sequence[Forecast]) -> Table:
    """Make the table of memory, traffic and time, with a column for each plan."""
    worst = [column.worst for column in columns]
    states = [group.trace.state for group in worst]
    peak_of_ddp = next((column.worst.trace.peak for column in columns if column.name == "DDP"), None)
    slowest = [column.slowest for column in columns]
    sent = [column.sent_at_most for column in columns]
    flops = [max(group.trace.flops for group in column.groups) for column in columns]
    meshes = [column.layout.mesh for column in columns]
    speeds = [column.samples_per_second * column.config.data.tokens_per_sample for column in columns]
    in_bytes = partial(bytes_row, decimal=True)

    def time_row(label: str, values: Sequence[float]) -> Row:
        return text_row(f"  {label}", [format_seconds(value) if value else None for value in values])

    rows = [
        text_row("sdp × fsdp × tp", [f"{mesh.sdp} × {mesh.fsdp} × {mesh.tp}" for mesh in meshes]),
        text_row("ZeRO stage", [str(column.config.zero_optimization.stage) for column in columns]),
        Row("memory of the rank that needs most"),
        in_bytes("parameters", [state.parameters for state in states]),
        in_bytes("gradients", [state.gradients for state in states]),
        in_bytes("optimizer", [state.optimizer for state in states]),
        in_bytes("frozen copies", [state.frozen or None for state in states]),
        in_bytes("anchors and outer state", [state.outer - state.outer_on_host or None for state in states]),
        in_bytes("anchors and outer state, on the host", [state.outer_on_host or None for state in states]),
        in_bytes("activations, at most", [group.trace.activations for group in worst]),
        in_bytes("communication buffers, at most", [group.trace.communication or None for group in worst]),
        in_bytes("peak", [group.trace.peak for group in worst], peak_of_ddp),
        Row("a rank in a step, at most"),
        text_row("  operations, recomputation included", list(map(format_flops, flops))),
        *(in_bytes(f"sent {link}", [traffic[link] for traffic in sent]) for link in LINKS),
        plain_row("communicators", [max(rank.communicators for rank in column.ranks) for column in columns], "d"),
        Row("expected time of a step"),
        time_row("computation", [rank.time.compute for rank in slowest]),
        time_row("tensor parallel, never hidden", [rank.time.tensor_parallel for rank in slowest]),
        time_row("inside groups, before hiding", [rank.time.inside for rank in slowest]),
        time_row("between groups or replicas, before hiding", [rank.time.between for rank in slowest]),
        time_row("frozen copies, before hiding", [rank.time.refresh for rank in slowest]),
        time_row("averages of weights, before hiding", [rank.time.outer for rank in slowest]),
        time_row("step, slowest rank", [column.seconds for column in columns]),
        plain_row("tokens/s" if columns[0].config.data.name is None else "images/s", speeds, ",.0f"),
    ]
    return Table([column.name for column in columns], rows).without_empty()


def list_collectives(plan: Forecast) -> str:
    """List what the slowest rank sends in a step, a line for each kind of collective."""
    sent = Counter[Any]()
    for one in plan.slowest.collectives:
        sent[one.scope, one.kind, len(one.ranks), plan.machine.link(one.ranks)] += one.sent  # type: ignore[assignment]
    names = {"between groups": "between replicas"} if plan.layout.mesh.sdp == 1 else {}
    rows = [
        Row(
            f"  {names.get(scope, scope)}: {kind.replace('_', '-')} of {ranks} ranks, {link}",
            bytes_row("", [nbytes], decimal=True).cells,
        )
        for (scope, kind, ranks, link), nbytes in sent.items()
    ]
    if not rows:
        return "nothing is sent\n"
    table = Table([""], [Row(f"sent by rank {plan.slowest.rank}, the slowest, in a step"), *rows]).text() + "\n"
    return table + _list_averages(plan)


def _list_averages(plan: Forecast) -> str:
    """List what the slowest rank sends between groups in a round of local steps."""
    sent = Counter[Any]()
    for one in plan.slowest.averages:
        sent[one.kind, len(one.ranks), plan.machine.link(one.ranks)] += one.sent  # type: ignore[assignment]
    rows = [
        Row(f"  {kind.replace('_', '-')} of {ranks} ranks, {link}", bytes_row("", [nbytes], decimal=True).cells)
        for (kind, ranks, link), nbytes in sent.items()
    ]
    if not rows:
        return ""
    head = Row(f"averages of weights, sent by rank {plan.slowest.rank} in a round of {plan.slowest.every} steps")
    if (sync := plan.config.sdp.sync) is not None and sync.fragments > 1:
        busiest = bytes_row("", [Messages(plan.layout, plan.config).in_busiest_step(plan.slowest.rank)], decimal=True)
        rows.append(Row("  of these, in the busiest step", busiest.cells))
    return Table([""], [head, *rows]).text() + "\n"


def assumptions(plan: Forecast, others: Sequence[Forecast]) -> list[str]:
    """List what the figures assume, and what they leave out. A reader needs both to use them."""
    return [
        *about_machine(plan.machine, plan.config),
        *_about_memory(plan),
        *_about_groups(plan),
        *_about_rates(plan),
        *_about_local_steps(plan),
        *_about_ddp(plan, others),
    ]


def about_machine(machine: Machine, config: Config) -> list[str]:
    """Say which speeds a plan assumes."""
    note = (
        f"Speeds are stated, not measured, and latencies are left out: {machine.flops / 1e12:,.0f} TFLOP/s a device, "
        f"of which a model achieves {machine.achieved:.0%}; a rank sends {format_rate(machine.inside)} "
        f"inside a node and {format_rate(machine.between)} between nodes."
    )
    is_default = machine.flops == quantity(PEAK_FLOPS, "FLOP/s", "--peak-flops")
    if config.precision == "float32" and is_default:
        note += " The rate is that of an H100 in bfloat16, but this run computes in float32; give --peak-flops."
    return [note]


def _about_memory(plan: Forecast) -> list[str]:
    trace = plan.worst.trace
    notes = [
        f"Memory is that of tensors of {_DEVICES[plan.machine.device]}. The device's context, "
        "the workspaces of libraries and the buffers of the communication library come on top."
    ]
    if trace.traced_blocks < trace.blocks:
        notes.append(
            f"{trace.traced_blocks} of {trace.blocks} blocks were traced. Further blocks of the same pattern each add "
            "as much as one of these."
        )
    if plan.config.training.compile:
        notes.append("Blocks are traced as if they were not compiled; compiled blocks need less.")
    return notes


def _about_rates(plan: Forecast) -> list[str]:
    if plan.rates is None:
        return []
    setting = plan.config.sdp.lr_scale
    return [f"sdp.lr_scale {setting} multiplies the learning rates of units by {plan.rates}. It needs no memory."]


def _about_groups(plan: Forecast) -> list[str]:
    notes = []
    if len(plan.groups) > 1:
        peaks: dict[str, list[int]] = {}
        for group in plan.groups:
            peaks.setdefault(format_bytes(group.trace.peak), []).append(group.trace.rank)
        texts = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {peak}" for peak, ranks in peaks.items()
        )
        notes.append(f"Groups differ; peaks: {'; '.join(texts)}.")
    if plan.untraced:
        groups = ", ".join(map(str, plan.untraced))
        notes.append(f"Not traced, and not in these figures: groups {groups}, which run other combinations of units.")
    if plan.reordered:
        groups = ", ".join(map(str, plan.reordered))
        notes.append(
            f"Groups {groups} run as much as a traced group, in another order. They are given its peak; their own may "
            "differ by a few per cent."
        )
    return notes


def _about_local_steps(plan: Forecast) -> list[str]:
    sync = plan.config.sdp.sync
    if sync is None:
        return []
    note = f"Bytes and seconds of a step are means over a round of {sync.every} local steps."
    if sync.start_after:
        note += f" The first {sync.start_after} steps average gradients in every step, and are not in these figures."
    if sync.overlap:
        note += " The peak includes the changes of a fragment that travel, and its weights at the start."
    return [note]


def _about_ddp(plan: Forecast, others: Sequence[Forecast]) -> list[str]:
    if not any(other.name == "DDP" for other in others):
        return []
    notes = [
        "DDP is planned with gradients that are views of its buckets (gradient_as_bucket_view); the buckets live "
        "through the whole step. Without this option, and with accumulation, DDP needs the gradients twice."
    ]
    if plan.config.precision != "float32":
        notes.append(
            "DDP keeps weights, gradients and optimizer state in float32, and runs the forward pass under "
            f"torch.autocast in {plan.config.precision}. Autocast keeps cast copies of the weights, which count as "
            "activations here."
        )
    return notes
