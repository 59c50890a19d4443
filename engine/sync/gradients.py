"""The cross-group layer: averages gradient shards among the holders of a unit, overlapped with backward; refreshes frozen copies.

A bucket is a run of parameters with one holder set. When the last of its gradients is ready at the accumulation boundary, they are
divided by the number of ranks into one buffer, which replaces them (no second copy stays), and an asynchronous all-reduce starts.
Buckets are started in one global order, that of backward, whatever the order in which autograd happens to fire: every communicator then
sees the same sequence on all of its ranks.

Under backward masking holders then send new weights to the groups that keep frozen copies of them, each to its part of these groups,
while the next forward pass begins: it waits before each block for that block's alone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed.mesh import Holders
from ..distributed.tensor_collectives import TensorRanks
from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic
from ..placement.buckets import Bucket


@dataclass
class _Pending:
    """A bucket of this rank on its way: how many gradients are still missing, and its reduction once started."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup
    ranks: int
    missing: int = 0
    work: dist.Work | None = None
    buffer: torch.Tensor | None = None


class GradientSync:
    """Averages the gradients of one rank's parameters with the other holders.

    ``buckets``: the global list; ``parameters``: this rank's, by canonical name; ``groups[holders]``: the communicator, absent
    where this rank is the only one. ``partial``: names of those whose gradient is this tensor-parallel rank's share, to be summed
    over ``tensor_ranks``. ``clock`` times what is left to wait for after backward: ``exposed_seconds``, since the start. ``all_reduce``
    starts a sum over a group.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[Holders, dist.ProcessGroup],
        traffic: Traffic,
        partial: Sequence[str] = (),
        tensor_ranks: TensorRanks | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], Any] = lambda tensor, group: dist.all_reduce(
            tensor, group=group, async_op=True
        ),
    ):
        self._traffic, self._clock, self._all_reduce = traffic, clock, all_reduce
        self.exposed_seconds = 0.0
        self._partial, self._tensor_ranks = [parameters[name] for name in partial], tensor_ranks
        self._summed = False  # whether the partial gradients are sums already
        self._pending: list[_Pending] = []
        self._alone: list[nn.Parameter] = []  # held by this rank only: nothing to send, so no hook either
        self._armed = False
        self._next = 0
        for bucket in buckets:
            held = [parameters[name] for name in bucket.names if name in parameters]
            if not held:
                continue
            group = groups.get(bucket.holders)
            if group is None:
                self._alone += held
                continue
            pending = _Pending(held, group, dist.get_world_size(group))
            self._pending.append(pending)
            for parameter in held:
                parameter.register_post_accumulate_grad_hook(self._hook(pending))

    def begin(self) -> None:
        """A backward pass begins. Sums that an earlier pass before the same step left become shares again, to which it adds."""
        if self._summed and self._tensor_ranks is not None:
            for parameter in self._partial:
                if parameter.grad is not None:
                    parameter.grad.div_(self._tensor_ranks.size)
        self._summed = False

    def dropped(self) -> None:
        """All gradients were dropped."""
        self._summed = False

    def arm(self) -> None:
        """The backward pass that comes is the last one before the optimizer step: reduce as gradients become ready."""
        for pending in self._pending:
            pending.missing, pending.work, pending.buffer = len(pending.parameters), None, None
        self._armed, self._next = True, 0

    def abandon(self) -> None:
        """The backward pass failed: reduce nothing more."""
        self._armed = False
        for pending in self._pending:
            pending.work = pending.buffer = None

    def _hook(self, pending: _Pending) -> Callable[[torch.Tensor], None]:
        """Holds neither: a parameter keeps its hooks where Python's garbage collector does not look, and would outlive the engine."""
        me, its = weakref.ref(self), weakref.ref(pending)

        def ready(_: torch.Tensor) -> None:
            sync, bucket = me(), its()
            if sync is not None and bucket is not None and sync._armed:
                bucket.missing -= 1
                sync._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        while self._next < len(self._pending) and self._pending[self._next].missing == 0:
            self._launch(self._pending[self._next])
            self._next += 1

    def _launch(self, pending: _Pending) -> None:
        pending.buffer = _coalesce(pending.parameters, pending.ranks)
        if pending.buffer.numel() == 0:
            return  # no rank of this communicator has a row of these parameters
        self._traffic.record("between groups", "all_reduce", pending.buffer.nbytes, pending.ranks)
        pending.work = self._all_reduce(pending.buffer, pending.group)

    def finish(self) -> None:
        """Start what is left (a parameter that took no part in the pass counts as a zero gradient) and await all."""
        left = self._pending[self._next :]
        for parameter in chain(self._alone, *(pending.parameters for pending in left)):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        for pending in left:
            pending.missing = 0
        self._launch_ready()
        self._armed = False
        started = self._clock()
        for pending in self._pending:
            if pending.work is not None:
                pending.work.wait()
            pending.work = pending.buffer = None
        self.exposed_seconds += self._clock() - started
        self._sum_over_tensor_ranks()

    def _sum_over_tensor_ranks(self) -> None:
        """Add up the shares in rank order, whatever the algorithms of a collective: copies stay bitwise equal on all holders."""
        if self._tensor_ranks is None or not self._partial:
            return
        gradients = [local_tensor(parameter.grad) for parameter in self._partial]  # type: ignore[arg-type]
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shares = mine.new_empty((self._tensor_ranks.size, mine.numel()))
        self._traffic.record("inside groups", "all_gather", shares.nbytes, self._tensor_ranks.size)
        dist.all_gather_into_tensor(shares.view(-1), mine, group=self._tensor_ranks.group)
        total = mine.copy_(shares[0])
        for share in shares[1:]:
            total += share
        for gradient, values in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        self._summed = True


def _coalesce(parameters: Sequence[nn.Parameter], ranks: int) -> torch.Tensor:
    """The local gradients over ``ranks``, whose sum is the mean, as one flat buffer, of which ``.grad`` become views; no copy where they
    already lie side by side.

    Divided before they are summed, as DDP and FSDP2 do: in the same pass over memory as the copy.
    """
    grads = [local_tensor(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
    if _side_by_side(grads):
        return grads[0].as_strided((sum(grad.numel() for grad in grads),), (1,)).div_(ranks)
    buffer = grads[0].new_empty(sum(grad.numel() for grad in grads))
    views = buffer.split([grad.numel() for grad in grads])
    for parameter, grad, view in zip(parameters, grads, views, strict=True):
        flat = torch.div(grad, ranks, out=view.view(grad.shape))
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                flat,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            parameter.grad = flat
    return buffer


def _side_by_side(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors fill one stretch of one storage, in order (FSDP2's sharded gradients do where shards are even)."""
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end:
            return False
        end += tensor.numel()
    return True
