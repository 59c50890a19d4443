"""Averages gradients among the holders of a unit while backward runs, and refreshes frozen copies.

A bucket is a sequence of parameters with the same holders. In the last micro-batch of a step, a
bucket is reduced as soon as all of its gradients are computed. The gradients are divided by the
number of ranks and written to one buffer, on which an asynchronous all-reduce starts. Each ``grad``
becomes a view of the buffer, so there is no second copy of the gradients.

All ranks launch buckets in the same order, even if autograd computes gradients in another order.
Otherwise two ranks could wait for each other in different collectives.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..distributed.collectives import Scope, Traffic, cut_like, local_tensor
from ..distributed.mesh import Holders, passes_on
from ..errors import HolderMismatchError, ModelError
from ..optim.clip import squared_norm
from ..placement.placement import Bucket, Refresh
from ..placement.units import SHARED
from ..stores.store import GroupStore, Messages, Stepped


class PendingBucket:
    """A bucket of gradients that are averaged in one all-reduce.

    In each step, call :meth:`arm`, :meth:`mark_ready` for every gradient, :meth:`launch`, and
    :meth:`wait`.

    Args:
        parameters: this rank's parameters of the bucket, in the bucket's order.
        group: the ranks that average the gradients.
        scope: the label under which the sent bytes are counted.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, scope: Scope = "between groups"):
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
        """Begin a step: no gradient of the bucket is computed yet."""
        self._missing = len(self.parameters)
        self._buffer = self._work = None

    def mark_ready(self) -> None:
        """Record that one more gradient is computed. Raises ModelError if there are too many."""
        if self._missing == 0:
            raise ModelError(
                "a forward pass uses a module several times inside reentrant checkpoints, and its gradient is complete "
                "only after the last use; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self._missing -= 1

    def mark_all_ready(self) -> None:
        """Record that backward has ended. Parameters that it did not use get zero gradients."""
        _fill_with_zeros(self.parameters)
        self._missing = 0

    def launch(self, messages: Messages, traffic: Traffic) -> None:
        """Start to average the gradients among the ranks of the group."""
        assert self.is_ready and self._buffer is None, "a bucket is launched once, when all of its gradients are ready"
        self._buffer = _coalesce(self.parameters, self._ranks)
        if self._buffer.numel() == 0:
            return  # no rank of this communicator has a row of these parameters
        traffic.record(self._scope, "all_reduce", self._buffer.nbytes, dist.get_process_group_ranks(self._group))
        self._work = messages.all_reduce(self._buffer, self._group)

    def wait(self) -> None:
        """Wait until the ``grad`` of every parameter in the bucket is the average."""
        assert self._buffer is not None, "a bucket is launched before anything waits for it"
        if self._work is not None:
            self._work.wait()
        self._buffer = self._work = None


class GradientSync:
    """Averages this rank's gradients with those of other holders, as soon as they are computed.

    Hooks on the parameters report when gradients are ready. Buckets are launched in the same order
    on all ranks.

    Args:
        buckets: the buckets of the full model, in launch order.
        parameters: this rank's parameters by name.
        communicators: for each set of holders, the process group that averages. A set is missing if
            this rank is its only rank.
        clock: returns the time in seconds. It measures how long this rank waits after backward.
        messages: starts the all-reduces.
        scope: the label under which the sent bytes are counted.

    Attributes:
        exposed_seconds: how long this rank has waited after backward passes, in total.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, torch.Tensor],
        communicators: Mapping[Holders, dist.ProcessGroup],
        traffic: Traffic,
        *,
        clock: Callable[[], float] = time.perf_counter,
        messages: Messages = Messages(),  # noqa: B008 (it has no state)
        scope: Scope = "between groups",
    ):
        self._traffic, self._clock, self._messages = traffic, clock, messages
        self.exposed_seconds = 0.0
        self._pending: list[PendingBucket] = []
        self._alone: list[torch.Tensor] = []  # held by this rank only: nothing to send, so no hook
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

    def arm(self) -> None:
        """Average gradients in the next backward pass, which is the last one before a step."""
        for pending in self._pending:
            pending.arm()
        self._armed, self._next = True, 0

    def abandon(self) -> None:
        """Stop averaging, because the backward pass raised an error."""
        self._armed = False

    def finish(self) -> None:
        """Average the gradients that are left, and wait until all averages have arrived.

        Call this after backward. A parameter that backward did not use gets a zero gradient.
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
            self._pending[self._next].launch(self._messages, self._traffic)
            self._next += 1


def _fill_with_zeros(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _coalesce(parameters: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
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


CHANGED = 2.0**1000
"""A rank adds this number to the squared gradient norm if a script has changed gradients."""

_ROUND_OFF = 1e-6


class FinalGradients:
    """Detects whether a script changes gradients between ``engine.backward`` and ``engine.step``.

    It does not detect changes through ``gradient.data``.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the present gradients, to compare later gradients with them."""
        self._seen = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]

    def forget(self) -> None:
        """Forget the gradients, which frees their memory."""
        self._seen = []

    def are_changed(self) -> bool:
        """Return whether gradients were replaced, or changed in place, since :meth:`note`."""
        return any(p.grad is not gradient or _version(p.grad) != version for p, gradient, version in self._seen)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version + local_tensor(gradient)._version


def unequal_holders(
    store: GroupStore,
    value_of: Callable[[Sequence[tuple[str, Stepped]]], float],
    dtype: torch.dtype,
    are_equal: Callable[[float, float], bool],
) -> tuple[str, str, str] | None:
    """Find a unit that has different values on two ranks that must agree. Collective.

    Ranks at the same position in two holders must agree. If ranks store no shards, all data ranks
    of all holders must agree. On tensors that tensor parallelism does not cut, tensor-parallel
    ranks must agree, too.

    Args:
        value_of: Returns a number for tensors of a unit, such as a checksum. The tensors are given
            as pairs of a key and a :class:`Stepped`.
        dtype: The dtype of the numbers.
        are_equal: Compares two numbers.

    Returns:
        On every rank: the unit, and the two ranks that differ, in words. None if no unit differs.
    """
    layout, mesh, device = store.layout, store.layout.mesh, store.context.device
    names = [SHARED, *(unit.name for unit in layout.units)]
    mine = torch.zeros((2, len(names)), dtype=dtype, device=device)
    for index, unit in enumerate(names):
        held = [(key, one) for key, one in store.stepped.items() if one.unit == unit]
        mine[0, index] = value_of(held)
        mine[1, index] = value_of([(key, one) for key, one in held if not one.is_cut])
    everyones = mine.new_empty((mesh.world_size, *mine.shape))
    dist.all_gather(list(everyones.unbind()), mine)
    values = everyones.tolist()
    for index, unit in enumerate(names):
        holders = layout.everyone if unit == SHARED else layout.placement.holders[index - 1]
        for group in holders:
            for other in mesh.ranks_of(group):
                at = mesh.coordinates(other)
                # Without shards, a group's ranks are replicas, which must agree too.
                first = mesh.rank(holders[0], at.fsdp if store.context.is_sharded else 0, at.tp)
                peer = mesh.rank(group, at.fsdp)  # has equal copies of tensors that tensor parallelism does not cut
                for row, one in ((0, first), (1, peer)):
                    if not are_equal(values[one][row][index], values[other][row][index]):
                        what = "the shared part" if unit == SHARED else f"unit {unit!r}"
                        first_group = mesh.coordinates(one).sdp
                        return what, f"rank {one} (group {first_group})", f"rank {other} (group {group})"
    return None


def compare_gradients(store: GroupStore) -> None:
    """Check that a script has changed gradients equally at all holders. Collective.

    Raises:
        HolderMismatchError: The gradient norm of a unit differs between two ranks. It is raised on
            every rank, and names the unit.
    """

    def norm(members: Sequence[tuple[str, Stepped]]) -> float:
        gradients = [one.tensor.grad for _, one in members if one.tensor.grad is not None]
        return squared_norm(gradients, store.context.device).sqrt().item()

    found = unequal_holders(store, norm, torch.float64, lambda a, b: abs(a - b) <= _ROUND_OFF * max(a, b))
    if found is not None:
        what, one, other = found
        raise HolderMismatchError(
            f"the script changed gradients between engine.backward and engine.step, so the gradients of {what} "
            f"differ between {one} and {other}; set gradient_clipping in the configuration, because "
            "torch.nn.utils.clip_grad_norm_ computes the norm of only one group's subnetwork; other changes must be "
            "equal on all ranks"
        )


class WeightRefresh:
    """Sends new weights from holders to frozen copies, and receives this rank's copies.

    All groups cut a parameter into the same shards. So rank i of a holder sends its shard to rank i
    of the other groups, directly into the memory of the copy.

    Args:
        refreshes: the broadcasts of the layout, in the same order on all ranks.
        parameters: this rank's parameters by name, held parameters and frozen copies.
        communicators: the process groups of this rank's broadcasts. A key has the SDP group that
            sends, and all SDP groups that take part.
        dtype: the dtype of the frozen copies. Weights are cast to it before they are sent.
        messages: starts the broadcasts.
        quantise: given a name and a weight, returns the two tensors of a quantised copy. If the
            weight is None, the held parameter of this name is quantised.
        quantised: the names of the parameters whose copies are quantised.
    """

    def __init__(
        self,
        refreshes: Sequence[Refresh],
        parameters: Mapping[str, torch.Tensor],
        communicators: Mapping[tuple[int, Holders], dist.ProcessGroup],
        traffic: Traffic,
        dtype: torch.dtype,
        messages: Messages,
        quantise: Callable[[str, torch.Tensor | None], Sequence[torch.Tensor]],
        quantised: Collection[str],
    ):
        self._messages, self._quantise, self._quantised = messages, quantise, quantised
        self._refreshes = [refresh for refresh in refreshes if (refresh.source, refresh.members) in communicators]
        self._parameters, self._communicators = parameters, communicators
        self._traffic, self._dtype = traffic, dtype
        self._pending: dict[str, list[tuple[dist.Work, torch.Tensor]]] = {}

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks of which this rank sends or receives weights."""
        return list(dict.fromkeys(refresh.block for refresh in self._refreshes))

    def start(self, names: Collection[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start to send and receive the weights of the parameters ``names``.

        All ranks must call this, with the same ``names``. Each rank takes part in the broadcasts
        that concern it. ``weights`` are sent instead of the parameters of the same names.
        """
        self.finish()
        for refresh in self._refreshes:
            pending = self._pending.setdefault(refresh.block, [])
            group, source = self._communicators[refresh.source, refresh.members], refresh.members.index(refresh.source)
            index, ranks = group.rank(), dist.get_process_group_ranks(group)
            sent = (name for name in refresh.names if name in names)
            for tensor in (one for name in sent for one in self._tensors(name, weights or {}, sends=index == source)):
                if tensor.numel() == 0:  # an empty shard is empty in all groups
                    continue
                if passes_on(index, source, len(ranks)):
                    self._traffic.record("between groups", "broadcast", tensor.nbytes, ranks)
                work = self._messages.broadcast(tensor, source, group)
                assert work is not None
                pending.append((work, tensor))  # the tensor must live until it is sent

    def _tensors(self, name: str, weights: Mapping[str, torch.Tensor], *, sends: bool) -> Sequence[torch.Tensor]:
        if name not in self._quantised:
            local = local_tensor(self._parameters[name].detach())
            if not sends:
                return [local]
            weight = weights[name].detach().to(local.device) if name in weights else local
            return [weight.to(self._dtype if weight.is_floating_point() else weight.dtype).contiguous()]
        if sends:
            return self._quantise(name, weights.get(name))
        return [local_tensor(self._parameters[f"{name}:{suffix}"].detach()) for suffix in "qs"]

    def wait(self, block: str, stream: torch.Stream | None = None) -> None:
        """Wait until the weights of one block have arrived.

        On CUDA, the current stream waits, and so does ``stream``, on which FSDP2 gathers weights.
        """
        for work, _ in self._pending.pop(block, ()):
            work.wait()
            if stream is not None:
                with torch.cuda.stream(stream):  # type: ignore[arg-type]
                    work.wait()

    def finish(self) -> None:
        """Wait until all weights that :meth:`start` began to send have arrived."""
        for block in list(self._pending):
            self.wait(block)
