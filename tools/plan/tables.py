"""A plan as tables on the terminal, with notes on what the figures assume and leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from ...engine.accounting.quantities import format_bytes, format_flops, format_rate, format_seconds
from ...engine.config.schema import Config
from ...engine.distributed.collectives import Collective
from ...engine.tracing.messages import Messages
from ..shared.quantities import quantity
from ..shared.table import Row, Table, bytes_row, plain_row, text_row
from .forecast import Forecast
from .machine import LINKS, PEAK_FLOPS, Machine

_DEVICES = {
    "cpu": "the operators of a CPU (for a GPU, give --device cuda)",
    "cuda": "the operators of a GPU (for a CPU, give --device cpu)",
}


def describe_plan(plans: Sequence[Forecast], notes: Sequence[str], world: str) -> str:
    """Return a plan as text: tables, and notes on what the figures assume.

    Args:
        plans: The plan of the run, then the plans of the other phases of a masking schedule. Each
            has a column.
        notes: Further notes, at the end.
        world: Text that says how many ranks there are, and why.
    """
    plan = plans[0]
    config, layout, batch = plan.config, plan.layout, plan.batch
    lines = [
        f"{config.model['name']}, {plan.parameters / 1e6:,.2f} M parameters, {config.precision}; "
        f"{world} on {describe_nodes(plan.machine)}",
        f"{batch.train:,} samples per step = micro-batch {batch.micro} × accumulation {batch.accumulation} × "
        f"{layout.mesh.data_ranks} data ranks; activation checkpointing: {config.activation_checkpointing.mode}",
    ]
    if layout.units and layout.mesh.sdp > 1:
        lines.append(f"placement: {layout.placement.describe()}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += ["", _figures(plans).text(), "", _collectives(plan), ""]
    lines += [f"- {note}" for note in (about_machine(plan.machine, config), *_about(plan), *notes)]
    return "\n".join(lines)


def describe_nodes(machine: Machine) -> str:
    """Return a text such as "2 nodes of up to 8", with the largest number of ranks of a node."""
    return f"{len(machine.slots)} node{'s' * (len(machine.slots) > 1)} of up to {max(machine.slots)}"


def _figures(columns: Sequence[Forecast]) -> Table:
    worst = [column.worst for column in columns]
    states = [group.trace.state for group in worst]
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
        in_bytes("peak", [group.trace.peak for group in worst]),
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


def _collectives(plan: Forecast) -> str:
    """List what the slowest rank sends in a step and in a round, by kind of collective."""
    rank, sync = plan.slowest, plan.config.sdp.sync
    names = {"between groups": "between replicas"} if plan.layout.mesh.sdp == 1 else {}

    def rows(collectives: Sequence[Collective]) -> list[Row]:
        sent = Counter[str]()
        for one in collectives:
            kind, link = one.kind.replace("_", "-"), plan.machine.link(one.ranks)
            sent[f"{names.get(one.scope, one.scope)}: {kind} of {len(one.ranks)} ranks, {link}"] += one.sent  # type: ignore[assignment]
        return [Row(f"  {label}", bytes_row("", [nbytes], decimal=True).cells) for label, nbytes in sent.items()]

    lines = [Row(f"sent by rank {rank.rank}, the slowest, in a step"), *rows(rank.collectives)]
    if rank.averages:
        lines += [
            Row(f"sent by rank {rank.rank} in a round of {rank.every} steps, averages of weights"),
            *rows(rank.averages),
        ]
    if rank.averages and sync is not None and sync.fragments > 1:
        busiest = Messages(plan.layout, plan.config).in_busiest_step(rank.rank)
        lines.append(Row("  of these, in the busiest step", bytes_row("", [busiest], decimal=True).cells))
    return Table([""], lines).without_empty().text().strip("\n") if len(lines) > 1 else "nothing is sent"


def about_machine(machine: Machine, config: Config) -> str:
    """Return the note that says which speeds a plan assumes."""
    note = (
        f"Speeds are stated, not measured, and latencies are left out: {machine.flops / 1e12:,.0f} TFLOP/s a device, "
        f"of which a model achieves {machine.achieved:.0%}; a rank sends {format_rate(machine.inside)} "
        f"inside a node and {format_rate(machine.between)} between nodes."
    )
    is_default = machine.flops == quantity(PEAK_FLOPS, "FLOP/s", "--peak-flops")
    if config.precision == "float32" and is_default:
        note += " The rate is that of an H100 in bfloat16, but this run computes in float32; give --peak-flops."
    return note


def _about(plan: Forecast) -> list[str]:
    trace, config, sync = plan.worst.trace, plan.config, plan.config.sdp.sync
    notes = [
        f"Memory is that of tensors, with {_DEVICES[plan.machine.device]}. The device's context, the workspaces of "
        "libraries and the buffers of the communication library need more."
    ]
    if trace.traced_blocks < trace.blocks:
        notes.append(
            f"{trace.traced_blocks} of {trace.blocks} blocks were traced. Each further block of the same pattern "
            "counts as one traced block."
        )
    if config.training.compile:
        notes.append("Blocks are traced as if they were not compiled; compiled blocks need less.")
    if len(plan.groups) > 1:
        peaks = {group.trace.rank: format_bytes(group.trace.peak) for group in plan.groups}
        notes.append(f"Groups differ; peaks: {'; '.join(f'rank {rank} {peak}' for rank, peak in peaks.items())}.")
    if plan.untraced:
        groups = ", ".join(map(str, plan.untraced))
        notes.append(
            f"Groups {groups} were not traced. They run other units than the traced groups, or in another order, but "
            "hold no more. So the largest traced peak counts for them. Their real peak may differ."
        )
    if plan.rates is not None:
        scale = config.sdp.lr_scale
        notes.append(
            f"sdp.lr_scale {scale} multiplies the learning rates of units by {plan.rates}. It needs no memory."
        )
    if sync is not None:
        notes.append(f"Bytes and seconds of a step are means over a round of {sync.every} local steps.")
        if sync.start_after:
            notes.append(
                f"The first {sync.start_after} steps average gradients in every step, and are not in these figures."
            )
        if sync.overlap:
            notes.append(
                "The peak includes what an average keeps while it overlaps with steps: for the largest fragment, the "
                "weights at the average's start, and their changes."
            )
    if (service := plan.service) is not None:
        notes.append(
            f"In a round, the service receives {format_bytes(service['receives'])} and sends "
            f"{format_bytes(service['sends'])}. This takes {format_seconds(service['seconds'])} at "
            f"{format_rate(plan.machine.between)}. From {service['groups']:,} groups on, it takes longer than the "
            "computation of a round."
        )
    return notes
