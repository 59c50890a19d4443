"""The ways to train a model that ``sdp bench CONFIG`` compares, and one training step of each.

DDP, FSDP2 (as ZeRO-3) and HSDP are written as a user of torch would write them. DiLoCo is this
engine's local steps of the dense model. All methods have the same model and weights, optimizer,
clipping, fused loss, compiled blocks and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...engine.batch.call import call_model, loss_of
from ...engine.batch.size import BatchSize
from ...engine.config.method import SyncSection
from ...engine.config.schema import Config, NamedParams
from ...engine.construct import values_to_give
from ...engine.distributed.mesh import mesh_of
from ...engine.engine import SDPEngine
from ...engine.errors import ConfigError, SDPError
from ...engine.initialize import initialize
from ...engine.model_interface import get_sharding_groups
from ...engine.optim.optimizers import build_optimizer
from ...engine.placement.layout import Layout
from ...engine.placement.tensor_info import Shard
from ...engine.subnetwork.execution import checkpoint_activations, compile_units
from ...engine.subnetwork.materialise import give_values
from ..plan.ways import dense_config
from ..runs.model_inputs import model_and_batch

Batch = Any
# By method of the dense model, the ZeRO stage with which it is planned.
DENSE = {"ddp": 0, "fsdp2": 3, "hsdp": 3, "diloco": 0}
SDP = ("sdp", "sdp-forward", "sdp-backward")
DEFAULT = (*DENSE, *SDP[1:])
REPLICAS = 2  # of the sharded model under HSDP
# Local steps between two averages, as in DiLoCo (Douillard et al., arXiv 2311.08105).
OUTER_EVERY = 50


def variant(name: str, config: Config, world: int) -> Config:
    """Return the configuration of the method ``name``.

    Args:
        name: The method. "sdp" trains as ``config`` says. "sdp-forward" and "sdp-backward" replace
            the masking in ``config``.
        config: The configuration that all methods share.
        world: The number of ranks.

    Raises:
        ConfigError: The name is unknown, or the masking of "sdp" is a schedule.
    """
    if name in DENSE:
        sync = (config.sdp.sync or SyncSection(every=OUTER_EVERY)) if name == "diloco" else None
        groups = {"hsdp": REPLICAS, "diloco": world}.get(name, 1)
        return dense_config(config, groups, DENSE[name], sync)
    if name not in SDP:
        raise ConfigError(
            f"--methods {name}: unknown; known: {', '.join((*DENSE, *SDP))}. Set capacity, granularity and local steps "
            "in CONFIG, or with --set, such as --set sdp.capacity=0.5"
        )
    if name != "sdp":
        return config.model_copy(update={"sdp": config.sdp.model_copy(update={"masking": name.removeprefix("sdp-")})})
    if len(config.sdp.maskings) > 1:
        raise ConfigError(
            "--methods sdp: sdp.masking is a schedule, and every phase has its own speed; write "
            "sdp-forward,sdp-backward"
        )
    return config


def why_not(name: str, config: Config, world: int) -> str | None:
    """Return the reason why a method cannot run on these ranks, or None if it can.

    Raises :class:`ConfigError` for an unknown name.
    """
    changed = variant(name, config, world)
    if name == "hsdp" and (world % REPLICAS or world == REPLICAS):
        return f"needs an even number of ranks, 4 or more; there are {world}"
    try:
        mesh = mesh_of(changed, world)
        BatchSize.resolve(changed, mesh)
        Layout.of(model_and_batch(changed)[0](), changed, mesh)
    except SDPError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Runner:
    """A method that is ready to run: a model with what is needed to train it.

    Attributes:
        parameters: The number of parameters that a rank computes with, even if other ranks keep
            some.
        module: The model.
        optimizer: The optimizer of the model's weights.
        step: Makes one optimizer step on this rank's micro-batches, and returns their mean loss.
        settle: Waits for transfers that a step leaves running.
        round: The number of steps in a round of local steps, or 1 without local steps.
        engine: The engine, if the method is SDP or DiLoCo.
        kept: Returns the tensors, other than parameters and optimizer state, that exist during all
            steps.
    """

    parameters: int
    module: nn.Module
    optimizer: Optimizer
    step: Callable[[Sequence[Batch]], Tensor]
    settle: Callable[[], None] = lambda: None
    round: int = 1
    engine: SDPEngine | None = None
    kept: Callable[[], Sequence[Tensor]] = tuple


def build(name: str, config: Config, device: torch.device) -> Runner:
    """Build the method ``name`` from the configuration that :func:`variant` returns. Collective."""
    if name not in SDP and name != "diloco":
        return _dense(name, config, device)
    section = config.sdp.model_copy(update={"check_interval": 0})
    config = config.model_copy(update={"sdp": section})
    return of_engine(initialize(model=model_and_batch(config)[0](), config=config)[0])


def of_engine(engine: SDPEngine) -> Runner:
    """Return a :class:`Runner` that trains with ``engine``."""

    def step(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            output = engine(batch)
            engine.backward(output)
            losses.append(loss_of(output).detach())
            engine.step()
        return torch.stack(losses).mean()

    def settle() -> None:
        _ = engine.frozen_here  # reading the copies waits for the refresh

    sync = engine.config.sdp.sync
    held = engine.layout.held(engine.layout.mesh.coordinates(engine.global_rank).sdp)
    return Runner(
        sum(info.numel for info in held),
        engine.module,
        engine.optimizer,
        step,
        settle,
        round=sync.every if sync is not None else 1,
        engine=engine,
        kept=engine.local_training.tensors_on_device,
    )


def _dense(name: str, config: Config, device: torch.device) -> Runner:
    """Build the full model under DDP, FSDP2 or HSDP, with the step that a user would write."""
    world, most = dist.get_world_size(), config.gradient_clipping
    model = model_and_batch(config)[0]()
    layout = Layout.of(model, config, mesh_of(config, world))
    values = values_to_give(model, config, layout)
    checkpoint_activations(model, layout.blocks, config.activation_checkpointing.mode)
    if config.training.compile:
        compile_units(model, layout.blocks, device)
    give_values(model, layout, values, device, Shard())
    parameters, buckets = sum(parameter.numel() for parameter in model.parameters()), list[Tensor]()
    parallel: nn.Module = model
    if name == "ddp":
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

        def noting(state, bucket):  # no annotations: DDP compares them with classes, but here they are strings
            if bucket.index() == 0:  # DDP replaces the buckets of the first step
                buckets.clear()
            buckets.append(bucket.buffer())
            return allreduce_hook(state, bucket)

        parallel.register_comm_hook(None, noting)
    else:
        shape = (world,) if name == "fsdp2" else (REPLICAS, world // REPLICAS)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for part in (*layout.blocks, *get_sharding_groups(model)):
            fully_shard(model.get_submodule(part), mesh=mesh)
        fully_shard(model, mesh=mesh)
    section = config.optimizer or NamedParams(type="AdamW")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(section.type, section.params, trained, device)[0]

    def step(batches: Sequence[Batch]) -> Tensor:
        losses = []
        for number, batch in enumerate(batches, 1):
            sends = number == len(batches) or name != "ddp"
            with nullcontext() if sends else parallel.no_sync():  # type: ignore[operator]
                loss = loss_of(call_model(parallel, batch))
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        if most > 0:
            nn.utils.clip_grad_norm_(trained, most)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return Runner(parameters, parallel, optimizer, step, kept=lambda: buckets)
