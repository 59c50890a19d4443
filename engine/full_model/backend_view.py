"""What the parts of a backend need of it, if each process holds one group's subnetwork."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..distributed.mesh import Coordinates
from ..distributed.process_groups import Communicators
from ..distributed.tensor_collectives import TensorRanks
from ..distributed.traffic import Traffic
from ..placement.layout import Layout


class SubnetworkBackend(Protocol):
    """One rank's part of a group's subnetwork, its optimizer, and its means to communicate."""

    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    rank: int
    at: Coordinates
    communicators: Communicators
    tensor_ranks: TensorRanks | None
    compute_dtype: torch.dtype
    optimizer: Optimizer
    clock: Callable[[], float]  # in seconds

    @property
    def parameters(self) -> Mapping[str, Any]:
        """This rank's parameters by canonical name; DTensors where they are sharded."""
        ...

    @property
    def stand_ins(self) -> Mapping[str, Any]:
        """The stand-ins of the blocks that this group skips, by name."""
        ...

    @property
    def shards(self) -> int:
        """The number of ranks that share a parameter; 1 if parameters are whole."""
        ...

    def gather_root(self) -> None:
        """Make the root module's own parameters whole; a no-op if they are whole."""
        ...

    def all_reduce_control(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = ...) -> None:
        """All-reduce a few numbers over all ranks in place. Collective."""
        ...

    def start_control(self, values: torch.Tensor) -> Callable[[], object]:
        """Start to sum a few numbers over all ranks in place. Collective.

        Returns:
            A function that waits for the result.
        """
        ...

    # -- steps -------------------------------------------------------------------------------------

    @property
    def basic_optimizer(self) -> Optimizer:
        """The user's or the configuration's optimizer, without what a library wraps around it."""
        ...

    @property
    def stepped(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the optimizer steps on, by canonical name."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that the next update uses."""
        ...

    def clip(self, gradients: list[torch.Tensor], norm: float) -> None:
        """Scale gradients of this ``norm`` in place, as the configuration says."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """A context for a step of the optimizer."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def shard_parameters(self) -> None:
        """Bring every parameter into its sharded form, with the values of the last update."""
        ...

    def agree_on_buffers(self) -> None:
        """Make persistent buffers the means over the ranks of their holders. Collective."""
        ...

    def local_weight(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter. Its memory may change between calls."""
        ...

    def refresh_from(self, anchors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Send the ``anchors`` of ``names`` to the frozen copies of other groups. Collective."""
        ...
