"""Averages gradient shards among the holders of a unit, overlapped with backward.

A bucket is a sequence of parameters with one holder set. At the accumulation boundary, a bucket is
reduced as soon as the last of its gradients is ready. The gradients are divided by the number of
ranks into one buffer, which replaces them, so that no second copy remains. Then an asynchronous
all-reduce starts.

Buckets are launched in one global order, that of backward, even if autograd computes gradients in
another order. So every communicator sees the same sequence on all of its ranks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed.mesh import Holders
from ..distributed.tensor_collectives import TensorRanks, all_gather_single
from ..distributed.tensors import cut_like, local_tensor
from ..distributed.traffic import Scope, Traffic
from ..errors import ModelError
from ..placement.buckets import Bucket
from .own_gradients import OwnGradients

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup], Any]


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start to sum ``tensor`` over ``group``. The result has a ``wait`` method."""
    return dist.all_reduce(tensor, group=group, async_op=True)


class PendingBucket:
    """One bucket during a backward pass: arm, mark each gradient as ready, launch, wait.

    Args:
        parameters: this rank's parameters of the bucket, in the bucket's order.
        group: the ranks that hold these parameters.
        scope: how the bytes sent are counted.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, scope: Scope = "between groups"):
        self.parameters, self._group = parameters, group
        self._scope: Scope = scope
        self._ranks = dist.get_world_size(group)
        self._missing = 0
        self._buffer: torch.Tensor | None = None
        self._work: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of the bucket are computed."""
        return self._missing == 0

    def arm(self) -> None:
        """Expect one gradient for each parameter."""
        self._missing = len(self.parameters)
        self._buffer = self._work = None

    def mark_ready(self) -> None:
        """Note that one more gradient is computed. Raises ModelError if there is one too many."""
        if self._missing == 0:
            raise ModelError(
                "a forward pass uses a module several times inside reentrant checkpoints, and its gradient is complete "
                "only after the last use; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self._missing -= 1

    def mark_all_ready(self) -> None:
        """Expect no more gradients.

        A parameter without a gradient took no part in the pass, so its gradient is zero.
        """
        _fill_with_zeros(self.parameters)
        self._missing = 0

    def launch(self, all_reduce: AllReduce, traffic: Traffic, own: OwnGradients | None = None) -> None:
        """Start to average the gradients among the ranks of the group. ``own`` takes them
        before.
        """
        assert self.is_ready and self._buffer is None, "a bucket is launched once, when all of its gradients are ready"
        self._buffer = _coalesce(self.parameters, self._ranks)
        if self._buffer.numel() == 0:
            return  # no rank of this communicator has a row of these parameters
        if own is not None:
            own.note(self.parameters, self._buffer)
        traffic.record(self._scope, "all_reduce", self._buffer.nbytes, self._ranks)
        self._work = all_reduce(self._buffer, self._group)

    def wait(self) -> None:
        """Wait until ``.grad`` of all parameters is the average."""
        assert self._buffer is not None, "a bucket is launched before anything waits for it"
        if self._work is not None:
            self._work.wait()
        self._buffer = self._work = None

    def abandon(self) -> None:
        """Forget a pass that failed."""
        self._buffer = self._work = None


class GradientSync:
    """Averages the gradients of one rank's parameters with the other holders.

    It launches the buckets in one global order. :class:`PendingBucket` handles one bucket.

    Args:
        buckets: the global list, in launch order.
        parameters: this rank's parameters, by canonical name.
        communicators: the communicator for each holder set that includes other ranks.
        traffic: counts the bytes sent.
        partial: names of parameters whose gradient is this tensor-parallel rank's share of a sum.
        tensor_ranks: the ranks over which partial gradients are summed.
        clock: measures the time left to wait after backward, in seconds.
        all_reduce: starts a sum over a communicator.
        scope: how the bytes sent are counted.

    Attributes:
        exposed_seconds: the time spent waiting after backward, since the start.
        own: takes the gradients before they are averaged, in steps in which noise is measured.
    """

    own: OwnGradients | None = None

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        communicators: Mapping[Holders, dist.ProcessGroup],
        traffic: Traffic,
        partial: Sequence[str] = (),
        tensor_ranks: TensorRanks | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        all_reduce: AllReduce = start_all_reduce,
        scope: Scope = "between groups",
    ):
        self._traffic, self._clock, self._all_reduce = traffic, clock, all_reduce
        self.exposed_seconds = 0.0
        self._partial, self._tensor_ranks = [parameters[name] for name in partial], tensor_ranks
        self._summed = False  # whether the partial gradients are sums already
        self._pending: list[PendingBucket] = []
        self._alone: list[nn.Parameter] = []  # held by this rank only: nothing to send, so no hook
        self._armed = False
        self._next = 0  # the index of the first bucket that is not launched yet
        for bucket in buckets:
            held = [parameters[name] for name in bucket.names if name in parameters]
            if not held:
                continue
            communicator = communicators.get(bucket.holders)
            if communicator is None:
                self._alone += held
                continue
            pending = PendingBucket(held, communicator, scope)
            self._pending.append(pending)
            for parameter in held:
                parameter.register_post_accumulate_grad_hook(self._make_hook(pending))

    def begin(self) -> None:
        """Prepare for a backward pass.

        An earlier pass before the same step may have left summed partial gradients. They become
        shares again, because this pass adds its shares to them.
        """
        if self._summed and self._tensor_ranks is not None:
            for parameter in self._partial:
                if parameter.grad is not None:
                    parameter.grad.div_(self._tensor_ranks.size)
        self._summed = False
        if self._measures is not None:
            self._measures.note_micro_batch()

    def note_dropped_gradients(self) -> None:
        """Note that all gradients were dropped."""
        self._summed = False

    def arm(self) -> None:
        """Reduce gradients as they become ready in the next backward pass.

        That pass is the last one before the optimizer step.
        """
        for pending in self._pending:
            pending.arm()
        self._armed, self._next = True, 0
        if self._measures is not None:
            self._measures.passes += 1

    def abandon(self) -> None:
        """Reduce nothing more, because the backward pass failed."""
        self._armed = False
        for pending in self._pending:
            pending.abandon()

    def finish(self) -> None:
        """Launch the buckets that are left, and wait for all.

        A parameter that took no part in the pass gets a zero gradient.
        """
        _fill_with_zeros(self._alone)
        for pending in self._pending[self._next :]:
            pending.mark_all_ready()
        self._launch_ready()
        self._armed = False
        started = self._clock()
        for pending in self._pending:
            pending.wait()
        self.exposed_seconds += self._clock() - started
        self._sum_over_tensor_ranks()
        if self._measures is not None:
            self._measures.finish()

    def _make_hook(self, pending: PendingBucket) -> Callable[[torch.Tensor], None]:
        """Return the hook that reports a gradient of ``pending``.

        It uses weak references. Parameters store hooks where the garbage collector cannot see them,
        so strong references would keep the engine alive forever.
        """
        sync_reference, bucket_reference = weakref.ref(self), weakref.ref(pending)

        def report(_: torch.Tensor) -> None:
            sync, bucket = sync_reference(), bucket_reference()
            if sync is not None and bucket is not None and sync._armed:
                bucket.mark_ready()
                sync._launch_ready()

        return report

    def _launch_ready(self) -> None:
        """Launch the buckets that are ready, up to the first in the global order that is not."""
        while self._next < len(self._pending) and self._pending[self._next].is_ready:
            self._pending[self._next].launch(self._all_reduce, self._traffic, self._measures)
            self._next += 1

    @property
    def _measures(self) -> OwnGradients | None:
        """What takes the gradients of this step before they are averaged, if it is measured."""
        return self.own if self.own is not None and self.own.is_due() else None

    def _sum_over_tensor_ranks(self) -> None:
        """Sum the partial gradients in rank order.

        A collective may sum in another order on another group. A fixed order keeps the copies
        bitwise equal on all holders.
        """
        if self._tensor_ranks is None or not self._partial:
            return
        gradients = [local_tensor(parameter.grad) for parameter in self._partial]  # type: ignore[arg-type]
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shares = mine.new_empty((self._tensor_ranks.size, mine.numel()))
        self._traffic.record("inside groups", "all_gather", shares.nbytes, self._tensor_ranks.size)
        all_gather_single(shares.view(-1), mine, group=self._tensor_ranks.group)
        total = mine.copy_(shares[0])
        for share in shares[1:]:
            total += share
        for gradient, values in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        self._summed = True


def _fill_with_zeros(parameters: Sequence[nn.Parameter]) -> None:
    """Give a zero gradient to each parameter that has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _coalesce(parameters: Sequence[nn.Parameter], ranks: int) -> torch.Tensor:
    """Divide the local gradients by ``ranks`` into one buffer. Each ``.grad`` becomes a view of it.

    Nothing is copied if the gradients are already adjacent in memory. Gradients are divided before
    they are summed, as in DDP and FSDP2, so that copy and division are one pass over memory.
    """
    grads = [local_tensor(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
    if _are_adjacent(grads):
        return grads[0].as_strided((sum(grad.numel() for grad in grads),), (1,)).div_(ranks)
    buffer = grads[0].new_empty(sum(grad.numel() for grad in grads))
    views = buffer.split([grad.numel() for grad in grads])
    for parameter, grad, view in zip(parameters, grads, views, strict=True):
        flat = torch.div(grad, ranks, out=view.view(grad.shape))
        parameter.grad = cut_like(flat, parameter.grad) if isinstance(parameter.grad, DTensor) else flat
    return buffer


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are contiguous in one storage, in order.

    This holds for FSDP2's sharded gradients if the shards are even.
    """
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end:
            return False
        end += tensor.numel()
    return True
