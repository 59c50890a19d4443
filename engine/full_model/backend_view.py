"""What this package needs of a backend that holds one group's subnetwork."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.mesh import Coordinates
from ..distributed.process_groups import Communicators
from ..distributed.tensor_collectives import TensorRanks
from ..distributed.traffic import Traffic
from ..placement.layout import Layout


class SubnetworkBackend(Protocol):
    """One rank's part of a group's subnetwork, and the means to communicate about it."""

    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    rank: int
    at: Coordinates
    communicators: Communicators
    tensor_ranks: TensorRanks | None
    compute_dtype: torch.dtype

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
