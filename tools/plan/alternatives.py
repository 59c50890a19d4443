"""Plans of other ways to train the same model on the same ranks, for comparison."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...engine.config.schema import Config, SDPSection
from ...engine.errors import SDPError
from ...engine.tracing.ledger import ACTIVATIONS, COMMUNICATION, GRADIENTS
from ...engine.tracing.step import StepTrace
from ..runs.model_inputs import model_and_batch
from .forecast import forecast
from .machine import Machine
from .result import Forecast

# By model, the key of its section that a smaller model lowers.
SIZE_KEYS = {"llama": "num_hidden_layers", "resnet18": "width"}


def alternatives(config: Config, machine: Machine, world: int) -> tuple[list[Forecast], list[str]]:
    """Plan the dense model under DDP, FSDP and HSDP, and give a line for each that cannot be
    planned.

    They have the same ranks, batch, tensor parallelism and recomputation.
    """
    planned, notes = [], []
    dense = {"DDP": (1, 0), "FSDP (ZeRO-3)": (1, 3), "HSDP": (len(machine.slots), 3)}
    if (why := why_not_hsdp(config, machine, world)) is not None:
        notes.append(why)
        del dense["HSDP"]
    if config.sdp.sync is not None and config.sdp.groups > 1:
        try:
            planned.append(forecast("DiLoCo", _dense_with_local_steps(config), machine, world))
        except SDPError as error:
            notes.append(f"DiLoCo: {error}")
    for name, (groups, stage) in dense.items():
        try:
            settings = dense_config(config, groups, stage)
            planned.append(
                distributed_data_parallel(settings, machine, world)
                if name == "DDP"
                else forecast(name, settings, machine, world)
            )
        except SDPError as error:
            notes.append(f"{name}: {error}")
    return planned, notes


def why_not_hsdp(config: Config, machine: Machine, world: int) -> str | None:
    """Say why HSDP, with a replica on each node, is no way of its own here. None if it is one."""
    nodes = len(machine.slots)
    if nodes == 1:
        return "HSDP: on one node it is FSDP"
    if config.tensor_parallel.autotp_size * nodes != world:
        return None
    why = (
        f"tensor parallelism of {config.tensor_parallel.autotp_size} fills a node"
        if world > nodes
        else "a node has one rank"
    )
    return f"HSDP: {why}, so there is no rank to share the state with; it is DDP"


def _dense_with_local_steps(config: Config) -> Config:
    """Return ``config`` for the dense model in as many groups, which average as ``sdp.sync`` says:
    DiLoCo.
    """
    dense = dense_config(config, config.sdp.groups, config.zero_optimization.stage)
    return dense.model_copy(update={"sdp": dense.sdp.model_copy(update={"sync": config.sdp.sync})})


def distributed_data_parallel(config: Config, machine: Machine, world: int) -> Forecast:
    """Plan a dense ``config`` without sharding under torch's DDP.

    Half precision is the one of torch's documentation: weights, gradients and optimizer state are
    in float32, and the forward pass runs under autocast. Autocast keeps cast copies of the weights
    until it ends, and backward keeps them as long as it needs them.
    """
    precision = getattr(torch, config.precision)
    if precision != torch.float32:
        off = {
            "bf16": config.bf16.model_copy(update={"enabled": False}),
            "fp16": config.fp16.model_copy(update={"enabled": False}),
        }
        config = config.model_copy(update=off)
    return with_buckets(
        forecast("DDP", config, machine, world, autocast=None if precision == torch.float32 else precision)
    )


def with_buckets(plan: Forecast) -> Forecast:
    """Return ``plan`` with the memory of torch's DDP.

    DDP's gradients are views of buckets that live through the whole step; the engine's gradients,
    which were traced, come and go. The gradients of earlier micro-batches are not sent, and exist
    next to the buckets.
    """

    def whole(trace: StepTrace) -> StepTrace:
        state = trace.state
        earlier = state.gradients if plan.batch.accumulation > 1 else 0
        kept = {"parameters": state.parameters, GRADIENTS: state.gradients, "optimizer": state.optimizer}
        combined = {COMMUNICATION: trace.combined[COMMUNICATION] + earlier, ACTIVATIONS: trace.combined[ACTIVATIONS]}
        at_peak = kept | {"buffers": trace.at_peak.get("buffers", 0)} | combined
        return replace(trace, at_peak=at_peak, communication=trace.communication + earlier)

    return replace(plan, groups=tuple(replace(group, trace=whole(group.trace)) for group in plan.groups))


def dense_config(config: Config, groups: int, stage: int) -> Config:
    """Return ``config`` for the dense model in ``groups`` replicas, each sharded by ZeRO
    ``stage``.
    """
    zero = config.zero_optimization.model_copy(update={"stage": stage})
    return config.model_copy(
        update={"sdp": SDPSection(groups=groups, units=config.sdp.units), "zero_optimization": zero}
    )


def smaller_dense(config: Config, parameters: int) -> Config | None:
    """Return ``config`` for the largest dense model with at most so many parameters.

    Layers or channels are left out. None if no size is small enough, or the model has no such size.
    """
    key = SIZE_KEYS.get(str(config.model.get("name")))
    if key is None or not isinstance(full := config.model.get(key), int):
        return None

    def sized(size: int) -> Config:
        return config.model_copy(update={"model": {**config.model, key: size}})

    low, high = 0, full  # the size is at least low, and at most high
    while low < high:
        middle = (low + high + 1) // 2
        model = model_and_batch(sized(middle))[0]()
        fits = sum(parameter.numel() for parameter in model.parameters()) <= parameters
        low, high = (middle, high) if fits else (low, middle - 1)
    return sized(low) if low else None
