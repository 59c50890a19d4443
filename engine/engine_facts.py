"""What the engine says of itself on a rank: its part of the model, its place, the batch, bytes of state and traffic; nothing is changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .accounting.memory import StateBytes
from .backend import Backend
from .batch.size import BatchSize
from .config.schema import Config
from .distributed.traffic import Traffic
from .environment.detect import detect
from .placement.layout import Layout


class EngineFacts:
    """What can be asked of :class:`~sdp.engine.engine.SDPEngine`, under ``deepspeed.DeepSpeedEngine``'s names where it has them."""

    def __init__(self, backend: Backend, config: Config, batch: BatchSize, optimizer: Optimizer):
        self._backend, self.config, self._batch, self.optimizer = backend, config, batch, optimizer
        self._gradient_bytes = 0  # at the last step

    @property
    def module(self) -> nn.Module:
        """This rank's subnetwork (of the reference: the full model)."""
        return self._backend.module

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine of this group. Raises AttributeError with other backends."""
        return self._backend.deepspeed  # type: ignore[attr-defined]

    @property
    def layout(self) -> Layout:
        return self._backend.layout

    @property
    def traffic(self) -> Traffic:
        """Bytes sent by this rank."""
        return self._backend.traffic

    @property
    def exposed_reduction_seconds(self) -> float:
        """Seconds since the start that this rank waited for reductions between groups which backward did not hide.

        On CUDA they are known with ``wall_clock_breakdown`` alone.
        """
        return self._backend.exposed_seconds

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def parameters_here(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by canonical name; DTensors where they are sharded."""
        return self._backend.parameters

    @property
    def frozen_here(self) -> dict[str, nn.Parameter]:
        """This rank's frozen copies, up to date, by canonical name (``sdp.masking`` "backward"); DTensors where they are sharded."""
        return self._backend.frozen

    @property
    def data_ranks_here(self) -> int:
        """Data ranks that this process stands for: 1, or all of them in the reference."""
        return self._backend.data_ranks_here

    @property
    def global_rank(self) -> int:
        return 0 if self._is_reference else dist.get_rank()

    @property
    def local_rank(self) -> int:
        place = detect()
        return place.local_rank if place is not None else self.device.index or 0

    @property
    def world_size(self) -> int:
        """Processes that train together; the reference is one by itself."""
        return 1 if self._is_reference else dist.get_world_size()

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group, for the step to come."""
        return self._backend.learning_rates()

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def train_batch_size(self) -> int:
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def predicted_state_bytes(self) -> StateBytes:
        """Parameter, gradient, optimizer and frozen bytes of this rank, by the placement."""
        return self._backend.predicted_state_bytes()

    def measured_state_bytes(self) -> StateBytes:
        """Bytes of this rank's tensors: parameters and optimizer state as they are now, gradients as at the last step."""
        return self._backend.measured_state_bytes(self._gradient_bytes)

    def planned_traffic(self) -> Traffic:
        """Bytes that this rank sends in one training step, by the placement; none in the reference, which is one process.

        With DeepSpeed, its own messages inside the group are not among them; ``comms_logger`` counts those.
        """
        return self._backend.planned_traffic(self._batch.accumulation)

    def traffic_formula(self) -> str:
        """The bytes that this rank sends between groups in a step, as a formula with its numbers."""
        return self._backend.traffic_formula()

    @property
    def _is_reference(self) -> bool:
        return self.config.sdp.in_one_process
