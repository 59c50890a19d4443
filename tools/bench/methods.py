"""The ways to train a model that ``sdp bench CONFIG`` compares, and one training step of each.

Each method is what a user of its library would run: DDP and FSDP2 are torch's, ZeRO is DeepSpeed's.
All methods have the same model and weights, optimizer, clipping, fused loss, compiled blocks and
batch. DiLoCo is the engine's: local steps of the dense model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...engine.batch.call import call_model, loss_of
from ...engine.batch.size import BatchSize
from ...engine.config.method import SyncSection
from ...engine.config.schema import Config, NamedParams
from ...engine.construct import values_to_give
from ...engine.distributed.mesh import mesh_of
from ...engine.engine import SDPEngine
from ...engine.environment.detect import alone_if_unlaunched
from ...engine.errors import ConfigError, SDPError
from ...engine.initialize import initialize
from ...engine.model_interface import get_sharding_groups
from ...engine.optim.optimizers import build_optimizer
from ...engine.placement.layout import Layout
from ...engine.placement.tensor_info import Shard
from ...engine.stores.deepspeed.private import forget_process_groups, load, set_verbosity
from ...engine.subnetwork.execution import checkpoint_activations, compile_units
from ...engine.subnetwork.materialise import give_values
from ..plan.ways import dense_config
from ..runs.model_inputs import model_and_batch

Batch = Any
# By method of the dense model, the ZeRO stage with which it is planned.
DENSE = {"ddp": 0, "fsdp2": 3, "hsdp": 3, "zero2": 2, "zero3": 3, "diloco": 0}
SDP = ("sdp", "sdp-forward", "sdp-backward")
DEFAULT = (*DENSE, *SDP[1:])
REPLICAS = 2  # of the shards of HSDP
# Local steps between two averages, as in DiLoCo (Douillard et al., arXiv 2311.08105).
OUTER_EVERY = 50

# Bytes of a bucket of DDP, and of DeepSpeed, whose default of 5e8 elements is larger than many
# models.
_BUCKET = 25 * 2**20


def variant(name: str, config: Config, world: int) -> Config:
    """Return the configuration of the method ``name``.

    Args:
        name: The method. "sdp" is as CONFIG says, "sdp-backward" with this masking.
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
            f"--methods {name}: unknown; known: {', '.join((*DENSE, *SDP))}. Capacity, granularity and local steps are "
            "those of CONFIG, such as --set sdp.capacity=0.5"
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
    """Say why the method cannot run here, or return None.

    Raises :class:`ConfigError` for an unknown name.
    """
    changed = variant(name, config, world)
    if name in ("zero2", "zero3") and importlib.util.find_spec("deepspeed") is None:
        return 'needs the package deepspeed; pip install "sdp-engine[deepspeed]"'
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
    """A method that is ready to run.

    Attributes:
        parameters: Number of elements that a rank computes with, wherever they are kept.
        module: The model.
        optimizer: The optimizer of its weights.
        step: Makes one optimizer step on this rank's micro-batches, and returns their mean loss.
        settle: Waits for transfers that a step leaves running.
        round: The number of steps after which the work repeats: of a round of local steps, else 1.
        counted: For SDP and DiLoCo: makes one more step, and returns bytes of state, real and
            planned, and bytes sent between groups.
        kept: Tensors that live through every step, apart from parameters and optimizer state.
    """

    parameters: int
    module: nn.Module
    optimizer: Optimizer
    step: Callable[[Sequence[Batch]], Tensor]
    settle: Callable[[], None] = lambda: None
    round: int = 1
    counted: Callable[[Sequence[Batch]], dict[str, int]] | None = None
    kept: Callable[[], Sequence[Tensor]] = tuple


def build(name: str, config: Config, device: torch.device) -> Runner:
    """Build the method ``name`` from its own configuration (see :func:`variant`). Collective."""
    if name in SDP or name == "diloco":
        return _sdp(config)
    made = _Dense(config, device)
    if name.startswith("zero"):
        return made.deepspeed(2 if name == "zero2" else 3)
    if name in ("fsdp2", "hsdp"):
        return made.fsdp2(REPLICAS if name == "hsdp" else 1)
    return made.ddp()


def _sdp(config: Config) -> Runner:
    section = config.sdp.model_copy(update={"check_interval": 0})
    engine: SDPEngine = initialize(
        model=model_and_batch(config)[0](), config=config.model_copy(update={"sdp": section})
    )[0]

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

    every = section.sync.every if section.sync is not None else 1

    def counted(batches: Sequence[Batch]) -> dict[str, int]:
        engine.traffic.reset()
        for _ in range(every):
            step(batches)
        sent = engine.traffic.by_kind().items()
        between = sum(nbytes for kind, nbytes in sent if kind.startswith("between groups"))
        return {
            "state_bytes": engine.measured_state_bytes().total,
            "planned_state_bytes": engine.predicted_state_bytes().total,
            "between_groups_bytes": round(between / every),
        }

    held = engine.layout.held(engine.layout.mesh.coordinates(engine.global_rank).sdp)
    return Runner(
        sum(info.numel for info in held),
        engine.module,
        engine.optimizer,
        step,
        settle,
        round=every,
        counted=counted,
        kept=engine.local_training.tensors_on_device,
    )


class _Dense:
    """The full model on this rank, with its weights, and the methods that can be made of it."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        mesh = mesh_of(config, dist.get_world_size())
        self.batch = BatchSize.resolve(config, mesh)
        self.model = model_and_batch(config)[0]()
        layout = Layout.of(self.model, config, mesh)
        self.blocks = layout.blocks
        values = values_to_give(self.model, config, layout)
        checkpoint_activations(self.model, self.blocks, config.activation_checkpointing.mode)
        if config.training.compile:
            compile_units(self.model, self.blocks, device)
        give_values(self.model, layout, values, device, Shard())
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def ddp(self) -> Runner:
        parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        buckets: list[Tensor] = []

        def noting(state, bucket):  # no annotations: DDP compares them with classes, but here they are strings
            if bucket.index() == 0:  # DDP replaces the buckets of the first step
                buckets.clear()
            buckets.append(bucket.buffer())
            return allreduce_hook(state, bucket)

        parallel.register_comm_hook(None, noting)
        optimizer = self._optimizer()
        return Runner(
            self.parameters,
            parallel,
            optimizer,
            self._loop(parallel, optimizer, parallel.no_sync),
            kept=lambda: buckets,
        )

    def fsdp2(self, replicas: int) -> Runner:
        """Shard each block, each part that the model asks for, and the rest.

        HSDP has several ``replicas``.
        """
        world, kind = dist.get_world_size(), self.device.type
        if replicas == 1:
            mesh = init_device_mesh(kind, (world,))
        else:
            mesh = init_device_mesh(kind, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        for name in (*self.blocks, *get_sharding_groups(self.model)):
            fully_shard(self.model.get_submodule(name), mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        optimizer = self._optimizer()
        return Runner(self.parameters, self.model, optimizer, self._loop(self.model, optimizer, nullcontext))

    def deepspeed(self, stage: int) -> Runner:
        package = load()
        forget_process_groups()
        set_verbosity({})
        bucket = min(self.parameters, _BUCKET // 4)
        settings = {
            "train_micro_batch_size_per_gpu": self.batch.micro,
            "gradient_accumulation_steps": self.batch.accumulation,
            "gradient_clipping": self.config.gradient_clipping,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
            "zero_allow_untested_optimizer": True,
        }
        plain = functional.linear
        try:
            with alone_if_unlaunched():
                engine = package.initialize(model=self.model, optimizer=self._optimizer(), config=settings)[0]
            native = functional.linear  # ZeRO 3 replaces it in torch, for all modules of the process
        finally:
            functional.linear = plain

        def step(batches: Sequence[Batch]) -> Tensor:
            losses = []
            functional.linear = native
            try:
                for batch in batches:
                    loss = loss_of(call_model(engine, batch))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.detach())
            finally:
                functional.linear = plain
            return torch.stack(losses).mean()

        return Runner(self.parameters, engine.module, engine.optimizer.optimizer, step)

    def _optimizer(self) -> Optimizer:
        section = self.config.optimizer or NamedParams(type="AdamW")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return build_optimizer(section.type, section.params, trained, self.device)[0]

    def _loop(
        self, model: nn.Module, optimizer: Optimizer, no_sync: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[Sequence[Batch]], Tensor]:
        """Make the training step that a user would write."""
        parameters, most = list(model.parameters()), self.config.gradient_clipping

        def step(batches: Sequence[Batch]) -> Tensor:
            losses = []
            for number, batch in enumerate(batches, 1):
                with nullcontext() if number == len(batches) else no_sync():
                    loss = loss_of(call_model(model, batch))
                    (loss / len(batches)).backward()
                losses.append(loss.detach())
            if most > 0:
                nn.utils.clip_grad_norm_(parameters, most)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean()

        return step
