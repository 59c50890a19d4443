"""Ways to train one model on the same ranks: the rows of ``sdp plan --compare``.

All ways have the ranks, batch, tensor parallelism and recomputation of the configuration. The plan
does not say which loss a way of training reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.config.method import Masking, SyncSection
from ...engine.config.schema import Config, SDPSection
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError, SDPError
from ...engine.placement.layout import Layout
from ...engine.tracing.ledger import ACTIVATIONS, COMMUNICATION, GRADIENTS
from ...engine.tracing.step import StepTrace
from ..runs.model_inputs import model_and_batch
from ..shared.table import Table, text_row
from .forecast import MOST_TRACES, Forecast, forecast, require_planned
from .machine import LINKS, Machine

DDP, SMALLER = "DDP", "smaller dense"
CAPACITY = 0.5  # capacity of SDP, if the configuration is dense
EVERY = 32  # steps of a round, if the configuration has no local steps
LARGE = 10**9  # parameters; for a larger model, only the group that holds most is traced for a row
# For each model, the key of the section ``model`` that is lowered for a smaller model.
SIZE_KEYS = {"llama": "num_hidden_layers", "resnet18": "width"}


def dense_config(config: Config, groups: int, stage: int, sync: SyncSection | None = None) -> Config:
    """Return ``config`` for the dense model in ``groups`` replicas, each sharded by ZeRO ``stage``.

    With ``sync``, the replicas take local steps (DiLoCo).
    """
    zero = config.zero_optimization.model_copy(update={"stage": stage})
    sdp = SDPSection(groups=groups, units=config.sdp.units, sync=sync)
    return config.model_copy(update={"sdp": sdp, "zero_optimization": zero})


def dense_ways(config: Config, machine: Machine, world: int) -> tuple[dict[str, Config], list[str]]:
    """Return the configurations of the dense model under DDP, FSDP, HSDP and ZeRO-2, and notes.

    HSDP has a replica on each node. If it equals FSDP or DDP, it is left out, and a note says so.
    """
    nodes, notes = len(machine.slots), []
    ways = {DDP: dense_config(config, 1, 0), "FSDP (ZeRO-3)": dense_config(config, 1, 3)}
    if nodes == 1:
        notes.append("HSDP: on one node it is FSDP")
    elif config.tensor_parallel.autotp_size * nodes == world:
        notes.append("HSDP: no two ranks of a node could share the state, so it is DDP")
    else:
        ways["HSDP"] = dense_config(config, nodes, 3)
    return ways | {"ZeRO-2": dense_config(config, 1, 2)}, notes


def distributed_data_parallel(config: Config, machine: Machine, world: int) -> Forecast:
    """Plan the dense model of ``config`` under torch's DDP.

    Half precision is used as torch's documentation says: weights, gradients and optimizer state are
    in float32, and the forward pass runs under autocast. So the plan includes the cast copies of
    weights that autocast and backward keep.
    """
    precision = getattr(torch, config.precision)
    off = {name: getattr(config, name).model_copy(update={"enabled": False}) for name in ("bf16", "fp16")}
    autocast = None if precision == torch.float32 else precision
    return with_buckets(forecast(DDP, config.model_copy(update=off), machine, world, autocast=autocast))


def with_buckets(plan: Forecast) -> Forecast:
    """Return ``plan`` with the memory that torch's DDP needs in place of this engine's.

    DDP keeps gradients in buckets during the whole step, but the traced engine frees them earlier.
    With several micro-batches, gradients of earlier micro-batches exist besides the buckets.
    """

    def whole(trace: StepTrace) -> StepTrace:
        state = trace.state
        earlier = state.gradients if plan.batch.accumulation > 1 else 0
        kept = {"parameters": state.parameters, GRADIENTS: state.gradients, "optimizer": state.optimizer}
        combined = {COMMUNICATION: trace.combined[COMMUNICATION] + earlier, ACTIVATIONS: trace.combined[ACTIVATIONS]}
        at_peak = kept | {"buffers": trace.at_peak.get("buffers", 0)} | combined
        return replace(trace, at_peak=at_peak, communication=trace.communication + earlier)

    return replace(plan, groups=tuple(replace(group, trace=whole(group.trace)) for group in plan.groups))


def smaller_dense(config: Config, parameters: int) -> Config | None:
    """Return ``config`` with as many layers or channels as ``parameters`` parameters allow.

    The size stays below that of ``config``. Returns None if even the smallest size has too many
    parameters, or if the size of this model cannot be changed.
    """
    key = SIZE_KEYS.get(str(config.model.get("name")))
    if key is None or not isinstance(full := config.model.get(key), int):
        return None

    def sized(size: int) -> Config:
        return config.model_copy(update={"model": {**config.model, key: size}})

    low, high = 0, full - 1  # the size is at least low, and at most high
    while low < high:
        middle = (low + high + 1) // 2
        model = model_and_batch(sized(middle))[0]()
        fits = sum(parameter.numel() for parameter in model.parameters()) <= parameters
        low, high = (middle, high) if fits else (low, middle - 1)
    return sized(low) if low > 0 else None


# -- the rows of ``--compare`` ---------------------------------------------------------------------


def compare(config: Config, machine: Machine, world: int) -> tuple[list[Forecast], list[str]]:
    """Plan all ways to train the model of ``config``.

    Returns:
        The plans, and notes: which ways cannot be planned, and which settings the planner chose.

    Raises:
        SDPError: Nothing can be planned.
    """
    require_planned(config)
    config, notes = _with_groups(config, machine, world)
    model = model_and_batch(config)[0]()
    layout = Layout.of(model, config, mesh_of(config, world)).in_phase("forward")
    ways, reasons = dense_ways(config, machine, world)
    notes += reasons
    if config.sdp.groups > 1:
        most = max(sum(info.numel for info in layout.held(group)) for group in range(layout.mesh.sdp))
        stage, sync = config.zero_optimization.stage, config.sdp.sync or SyncSection(every=EVERY)
        if (small := smaller_dense(config, most)) is None:
            notes.append(f"{SMALLER}: this model has no smaller size with at most {most:,} parameters")
        else:
            ways[SMALLER] = dense_config(small, config.sdp.groups, stage)
        ways |= {"DiLoCo": dense_config(config, config.sdp.groups, stage, sync), **_sdp_ways(config, sync)}
        notes.append(
            "DiLoCo, the smaller dense model (with at most the parameters of a group under forward masking) and SDP "
            f"have sdp.groups {config.sdp.groups} and zero_optimization.stage {stage}. With local steps, weights are "
            f"averaged every {sync.every} steps."
        )
    traces = 1 if sum(parameter.numel() for parameter in model.parameters()) >= LARGE else MOST_TRACES
    plans = []
    for name, way in ways.items():
        try:
            if name == DDP:
                plans.append(distributed_data_parallel(way, machine, world))
            else:
                plans.append(forecast(name, way, machine, world, traces=traces))
        except SDPError as error:
            notes.append(f"{name}: {error}")
    if not plans:
        raise ConfigError(f"nothing can be planned: {'; '.join(notes)}")
    notes += [
        f"{plan.name}: {others} groups were not traced. They run other units than the traced groups, or in another "
        "order, so their peaks may differ."
        for plan in plans
        if (others := len(plan.untraced))
    ]
    if len(config.sdp.maskings) > 1:
        notes.append("sdp.masking is a schedule, which needs the larger peak of its maskings.")
    notes.append(
        "DDP is planned with gradients that are views of its buckets (gradient_as_bucket_view), and in half precision "
        "with float32 weights under torch.autocast, whose cast copies count as activations."
    )
    return plans, [
        *notes,
        "The plan does not say which loss each row reaches. `sdp plan` without --compare shows one way in detail.",
    ]


def _with_groups(config: Config, machine: Machine, world: int) -> tuple[Config, list[str]]:
    """Return ``config`` with SDP groups, and a note if they were chosen here.

    A dense configuration gets a group for each node, or on one node for each rank.
    """
    sdp, nodes = config.sdp, len(machine.slots)
    if (sdp.groups > 1 and sdp.capacity != 1.0) or sdp.paths is not None:
        return config, []
    of_ranks = max(1, world // config.tensor_parallel.autotp_size)
    groups = sdp.groups if sdp.groups > 1 else (nodes if nodes > 1 and world % nodes == 0 else of_ranks)
    if groups == 1:
        return config, ["SDP and DiLoCo need at least two groups"]
    note = f"The configuration is dense. SDP is planned with sdp.groups {groups} and sdp.capacity {CAPACITY:g}."
    return _with_sdp(config, groups=groups, capacity=CAPACITY), [note]


def _sdp_ways(config: Config, sync: SyncSection) -> dict[str, Config]:
    """Return the configurations of SDP. Learning rates by holders are off with local steps."""
    if config.sdp.paths is not None:
        return {
            "paths": _with_sdp(config, sync=None),
            "paths, local steps": _with_sdp(config, sync=sync, lr_scale="none"),
        }
    masking: Masking = "backward" if "backward" in config.sdp.maskings else "forward"
    return {
        "SDP, forward": _with_sdp(config, masking="forward", sync=None),
        "SDP, backward": _with_sdp(config, masking="backward", sync=None),
        f"SDP, {masking}, local steps": _with_sdp(config, masking=masking, sync=sync, lr_scale="none"),
    }


def _with_sdp(config: Config, **keys: object) -> Config:
    return config.model_copy(update={"sdp": config.sdp.model_copy(update=keys)})


def compare_table(plans: Sequence[Forecast], memory: float | None) -> str:
    """Return a table of plans as text. With ``memory`` (of a device), a column says which fit."""
    fits = ["fits"] if memory is not None else []
    header = ["groups × ranks", "ZeRO", "peak", *fits, "time of a step", *(f"sent {link}" for link in LINKS)]
    rows = []
    for plan in plans:
        row = row_json(plan, memory)
        cells = [f"{row['groups']} × {row['ranks_of_group']}", str(row["zero_stage"]), format_bytes(row["peak"])]
        cells += ["yes" if row["fits"] else "no"] if fits else []
        cells += [format_seconds(row["seconds"]), *(format_bytes(row["sent"][link]) for link in LINKS)]
        rows.append(text_row(plan.name, cells))
    return Table(header, rows).text()


def row_json(plan: Forecast, memory: float | None) -> dict[str, Any]:
    """Return the figures of a plan by name. "others" counts groups that were not traced."""
    mesh, peak = plan.layout.mesh, plan.worst.trace.peak
    return {
        "name": plan.name,
        "parameters": plan.parameters,
        "groups": mesh.sdp,
        "ranks_of_group": mesh.fsdp * mesh.tp,
        "zero_stage": plan.config.zero_optimization.stage,
        "peak": peak,
        "seconds": plan.seconds,
        "sent": plan.sent_at_most,
        "others": len(plan.untraced),
        **({} if memory is None else {"fits": peak <= memory}),
    }
