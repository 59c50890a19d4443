"""Shared code of the backends with one process per rank: buffers, evaluation, control messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.masking import Masking
from ..distributed.mesh import Coordinates
from ..distributed.process_groups import Communicators
from ..distributed.traffic import Traffic
from ..full_model.backend_view import SubnetworkBackend
from ..full_model.buffers import agree_on_buffers
from ..full_model.evaluation import subnetwork_losses
from ..full_model.gather import stream_full_state
from ..full_model.recalibration import Statistics, batch_statistics
from ..placement.layout import Layout
from ..subnetwork.carve import PassThrough
from ..subnetwork.dormant import DormantCopies
from ..sync.weights import WeightRefresh
from .base import TorchOptimizerBackend
from .local_steps import ShardedLocalSteps


class ShardedBackend(TorchOptimizerBackend):
    """Base of the FSDP2 and DeepSpeed backends.

    Each rank holds a shard of its group's subnetwork.
    """

    stage: int  # of ZeRO
    communicators: Communicators
    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    rank: int
    at: Coordinates
    stand_ins: Mapping[str, PassThrough]
    _frozen: dict[str, nn.Parameter]
    _refresh: WeightRefresh
    _dormant: DormantCopies | None = None  # with a schedule that has both maskings

    @property
    def local(self) -> ShardedLocalSteps | None:
        return None

    @property
    def exposed_seconds(self) -> float:
        raise NotImplementedError

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, *, boundary: bool, weights: torch.Tensor | None = None) -> None:
        raise NotImplementedError

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> tuple[float, float]:
        raise NotImplementedError

    def evaluate(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        raise NotImplementedError

    def _evaluating(self) -> AbstractContextManager[None]:
        """A context without gradients in which several passes may take turns."""
        raise NotImplementedError

    def _view(self) -> SubnetworkBackend:
        """This backend as evaluation and the full state dict see it."""
        raise NotImplementedError

    # -- facts -------------------------------------------------------------------------------------

    @property
    def data_ranks_here(self) -> int:
        return 1

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        self._refresh.finish()
        return self._frozen if self.layout.keeps_frozen else {}

    def use_masking(self, masking: Masking) -> None:
        if masking != self.layout.masking:
            self.enter_phase(self.phases[masking])

    def enter_phase(self, layout: Layout) -> None:
        """Run as ``layout`` says from now on. Collective."""
        if layout.masking != self.layout.masking:
            self.shard_parameters()
            self.put_aside(asleep=not layout.keeps_frozen)
        self.layout = layout
        self.refresh(after_step=False)

    def put_aside(self, *, asleep: bool) -> None:
        """Put the frozen copies aside, or back."""
        assert self._dormant is not None
        if asleep:
            self._dormant.sleep()
        else:
            self._dormant.wake()
        self.stand_ins = self._dormant.stand_ins if asleep else {}

    def all_reduce_control(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduce a few numbers over all ranks in place. Collective."""
        self.start_control(values, op)()

    def start_control(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Callable[[], object]:
        """Start to all-reduce a few numbers over all ranks in place. Collective.

        Returns:
            A function that waits for the result.
        """
        if self.layout.mesh.world_size == 1:
            # gloo wakes a thread even for one rank: 0.1 ms if idle, milliseconds on a loaded
            # machine.
            return lambda: None
        self.traffic.record("control", "all_reduce", values.nbytes, self.layout.mesh.world_size)
        work = dist.all_reduce(values, op=op, async_op=True)
        assert work is not None
        return work.wait

    def agree_on_buffers(self) -> None:
        agree_on_buffers(self._view())

    def batch_statistics(self, batches: Sequence[Any]) -> Statistics:
        guests = [
            named for name, stand_in in self.stand_ins.items() for named in stand_in.skeleton.named_modules(prefix=name)
        ]
        return batch_statistics(
            [*self.module.named_modules(), *guests],
            lambda: self.evaluate(batches, [1] * len(batches)),
            self.all_reduce_control,
            self.device,
        )

    def evaluate_subnetworks(self, batches: Sequence[Any]) -> list[float]:
        if self.local is None:
            self.agree_on_buffers()
        with self._evaluating(), self.local.group_statistics() if self.local is not None else nullcontext():
            return subnetwork_losses(self._view(), batches)

    def stream_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        self.shard_parameters()
        self.agree_on_buffers()
        return stream_full_state(self._view())
