"""The state of one rank under DeepSpeed: its engine, its ZeRO partitions or copies, and the bundles that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...placement.tensor_info import Shard
from ..sharded import ShardedBackend
from .optimizer import LossScale, MasterCopies, ZeroState
from .partitions import Bundle, Piece, pieces_of
from .process_groups import ProcessGroups


class HeldByDeepSpeed(ShardedBackend):
    """What DeepSpeed holds for this rank. The backend fills the attributes."""

    deepspeed: Any  # DeepSpeed's own engine of this group
    stage: int
    compute_dtype: torch.dtype
    installed: bool  # whether there are several groups, so that averages between them are installed
    bundles: list[Bundle]  # DeepSpeed's parameter groups, in order
    options: list[int]  # for each of them, the index of the user's parameter group
    options_count: int
    zero: ZeroState | None
    copies: MasterCopies | None
    scale: LossScale
    _process_groups: ProcessGroups

    @property
    def library_engine(self) -> Any:
        return self.deepspeed

    @property
    def stepped(self) -> dict[str, torch.Tensor]:
        """The tensors that stage 0 steps on: float32 copies in half precision, else the parameters."""
        return {**self.parameters, **(self.copies.masters if self.copies is not None else {})}

    @property
    def masters(self) -> list[torch.Tensor]:
        """Float32 weights other than the model's own: this rank's partitions, or copies of parameters."""
        if self.zero is not None:
            return self.zero.masters
        return list(self.copies.masters.values()) if self.copies is not None else []

    @property
    def ranks_inside(self) -> int:
        """The number of ranks among which DeepSpeed partitions this group's state."""
        return dist.get_world_size(self._process_groups.inside)

    @property
    def rank_inside(self) -> int:
        """This rank's index among them."""
        return dist.get_rank(self._process_groups.inside)

    @property
    def shard(self) -> Shard:
        return Shard()

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """This rank's pieces of every bundle's parameters, each with the bundle's index (ZeRO 1 to 3)."""
        for index, bundle in enumerate(self.bundles):
            for piece in pieces_of(bundle, self.stage, self.ranks_inside, self.rank_inside):
                yield index, piece

    def all_reduce_inside(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks of the group in place."""
        if self.ranks_inside > 1:
            self.traffic.record("inside groups", "all_reduce", tensor.nbytes, self.ranks_inside)
            dist.all_reduce(tensor, group=self._process_groups.inside)
