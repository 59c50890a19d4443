"""Gradient noise on the native backend: what is measured of the gradients that it averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...distributed.mesh import Coordinates
from ...distributed.process_groups import make_replicas
from ...distributed.tensor_collectives import TensorRanks
from ...distributed.traffic import Traffic
from ...placement.layout import Layout
from ...sync.gradients import GradientSync
from ...sync.noise import SecondMoments
from ...sync.own_gradients import OwnGradients


class Native(Protocol):
    """What the measurement needs of the native backend."""

    layout: Layout
    parameters: dict[str, nn.Parameter]
    at: Coordinates
    device: torch.device
    traffic: Traffic
    tensor_ranks: TensorRanks | None
    shards: int
    _sync: GradientSync

    @property
    def basic_optimizer(self) -> Optimizer: ...

    @property
    def stepped(self) -> Mapping[str, torch.Tensor]: ...


def make_noise(self: Native) -> OwnGradients:
    """Make what measures the noise, and let the averages of gradients tell it. Collective."""
    moments = SecondMoments(self.basic_optimizer)
    noise = OwnGradients(
        self.layout,
        self.parameters,
        self.at,
        self.device,
        self.traffic,
        lambda name: moments.of(self.stepped.get(name)),
        inside=make_replicas(self.layout.mesh) if self.shards == 1 else None,
        tensor_ranks=self.tensor_ranks,
        sharded=self.shards > 1,
    )
    self._sync.own = noise
    return noise
