"""The interface of a store: one rank's share of a group's subnetwork."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..distributed.collectives import TensorRanks, Traffic
from ..distributed.mesh import Coordinates, Holders, Mesh
from ..distributed.process_groups import Communicators
from ..errors import ConfigError
from ..optim import optimizer_state
from ..optim.script_optimizers import on_local_tensors, stepped_by_engine
from ..placement.layout import Layout
from ..placement.placement import Bucket
from ..placement.tensor_info import TensorInfo


class Stepped(NamedTuple):
    """A tensor on which the optimizer steps, or a parameter that it does not have.

    Attributes:
        tensor: the tensor, whose ``grad`` is the gradient. FSDP2: a parameter. ZeRO: the float32
            partition of the parameters of a unit.
        unit: the unit to which it belongs.
        holders: the groups that hold the unit.
        names: the parameters, or slices of them, in it.
        group: the index of its parameter group in the optimizer. None if the optimizer does not
            have it.
        is_cut: whether tensor parallelism cuts the tensor. If not, all tensor-parallel ranks have
            equal copies.
    """

    tensor: torch.Tensor
    unit: str
    holders: Holders
    names: tuple[str, ...]
    group: int | None
    is_cut: bool = False


class Piece(NamedTuple):
    """Elements of a tensor of the full model, as a view.

    Attributes:
        info: the parameter, or the slice of one.
        tensor: the elements.
        offset: the position of the first one in the full model's parameter.
    """

    info: TensorInfo
    tensor: torch.Tensor
    offset: tuple[int, ...]


class Messages:
    """Starts messages between groups. Results have a ``wait`` method."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place."""
        return dist.all_reduce(tensor, group=group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to send the tensor of the member ``source``."""
        return dist.broadcast(tensor, group_src=source, group=group, async_op=True)


class DeviceMessages(Messages):
    """Sends tensors through the device, because NCCL cannot send tensors in the host's memory."""

    def __init__(self, device: torch.device):
        self._device = device

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` must be copied to the device to be sent."""
        return tensor.device.type != self._device.type

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place."""
        return self.send(tensor, lambda sent: dist.all_reduce(sent, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to send the tensor of the member ``source``."""
        return self.send(tensor, lambda sent: dist.broadcast(sent, group_src=source, group=group, async_op=True))

    def send(self, tensor: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> Any:
        """Start a message with ``start``, which gets ``tensor`` or a copy on the device."""
        sent = tensor.to(self._device, copy=True) if self.is_elsewhere(tensor) else tensor
        work = start(sent)
        return work if sent is tensor else _Staged(tensor, sent, work)


class _Staged:
    """A message that goes through a copy. ``wait`` copies the result back."""

    def __init__(self, home: torch.Tensor, sent: torch.Tensor, work: Any):
        self._home, self._sent, self._work = home, sent, work

    def wait(self) -> None:
        self._work.wait()
        self._home.copy_(self._sent)


@dataclass
class RankContext:
    """A rank's position in the mesh, its process groups, and the bytes that it has sent.

    Attributes:
        rank: in the world.
        at: its coordinates in the mesh.
        mesh: the mesh.
        device: the device on which it computes.
        stage: the ZeRO stage.
        compute_dtype: the dtype of forward and backward.
        communicators: its process groups.
        traffic: the bytes that it has sent.
        tensor_ranks: its tensor-parallel ranks. None without tensor parallelism.
        shards: among how many ranks :meth:`GroupStore.local_weight` cuts a parameter; 1 if it is
            whole.
        buckets: the gradients that are averaged in one message, in the order of all ranks. The
            names are keys of :attr:`GroupStore.stepped`.
        messages: starts messages between groups.
        awaits_blocks: whether a block waits for refreshed copies only when it runs. If not, all
            copies are awaited at once.
        user_groups: for each parameter group of the optimizer, the index of the user's parameter
            group. None: the groups are the user's.
        user_group_count: the number of the user's groups, if they are not.
        needs_whole_matrices: whether the optimizer's step depends on whole matrices.
        passes_together: how many forward passes of an evaluation may run interleaved. None: any
            number.
        shard_of_copy: returns this rank's shard of a frozen tensor, from the holder's whole
            :meth:`GroupStore.local_weight`.
        gather_stream: returns the stream on which a block's shards are gathered, or None.
        clock: measures the time spent waiting, in seconds.
        service: the group's membership in a run whose anchors a service keeps
            (:class:`~sdp.engine.service.steps.Membership`), or None.
    """

    rank: int
    at: Coordinates
    mesh: Mesh
    device: torch.device
    stage: int
    compute_dtype: torch.dtype
    communicators: Communicators
    traffic: Traffic
    tensor_ranks: TensorRanks | None = None
    shards: int = 1
    buckets: Sequence[Bucket] = ()
    messages: Messages = field(default_factory=Messages)
    awaits_blocks: bool = True
    user_groups: Sequence[int] | None = None
    user_group_count: int = 0
    needs_whole_matrices: bool = False
    passes_together: int | None = None
    shard_of_copy: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    gather_stream: Callable[[nn.Module], torch.Stream | None] = lambda _: None
    clock: Callable[[], float] = time.perf_counter
    service: Any = None

    def __post_init__(self) -> None:
        self.world_size = self.mesh.world_size

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks of a group have different elements, and not equal copies."""
        return self.mesh.shards(self.stage) > 1

    def counts(self, stepped: Stepped) -> bool:
        """Return whether this rank counts a tensor in the norm over its group."""
        return (self.is_sharded or self.at.fsdp == 0) and (stepped.is_cut or self.at.tp == 0)

    def counts_once(self, stepped: Stepped) -> bool:
        """Return whether this rank counts a tensor in the norm over the full model."""
        return self.counts(stepped) and stepped.holders[0] == self.at.sdp

    def start_control(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Callable[[], object]:
        """Start to all-reduce a few numbers over all ranks in place. Collective.

        Returns:
            A function that waits for the result.
        """
        if self.world_size == 1:
            # gloo wakes a thread even for one rank: 0.1 ms if idle, milliseconds on a loaded
            # machine.
            return lambda: None
        self.traffic.record("control", "all_reduce", values.nbytes, range(self.world_size))
        work = dist.all_reduce(values, op=op, async_op=True)
        assert work is not None
        return work.wait

    def all_reduce_control(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduce a few numbers over all ranks in place. Collective."""
        self.start_control(values, op)()

    def sum_in_group(self, values: torch.Tensor) -> None:
        """Sum a few numbers over the ranks of this group in place. Collective in the group."""
        group = self.communicators.group
        if group is not None:
            self.traffic.record("control", "all_reduce", values.nbytes, dist.get_process_group_ranks(group))
            dist.all_reduce(values, group=group)


class Averages(Protocol):
    """Averages gradients among holders, during a backward pass."""

    def arm(self) -> None:
        """Begin to average gradients as they become ready."""
        ...

    def abandon(self) -> None:
        """End after an error."""
        ...

    def finish(self) -> None:
        """Wait until every ``grad`` is the average."""
        ...


class GroupStore(Protocol):
    """The share of a group's subnetwork that one rank has: weights, gradients, optimizer.

    A store computes, reduces gradients inside the group, and steps. Everything between groups is in
    :mod:`sdp.engine.sync`, for all stores.
    """

    layout: Layout  # in the present phase of a schedule of maskings
    module: nn.Module  # this rank's subnetwork
    context: RankContext
    parameters: dict[str, nn.Parameter]  # those that the group holds, by name
    optimizer: Optimizer  # torch's, which steps on ``stepped``

    @property
    def stepped(self) -> Mapping[str, Stepped]:
        """The tensors that the optimizer steps on, and held parameters that it does not have."""
        ...

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """Return the subnetwork's result for a micro-batch."""
        ...

    def backward(self, loss: torch.Tensor, averages: Averages | None) -> None:
        """Accumulate gradients. In the last micro-batch of a step, ``averages`` is given;
        afterwards ``grad`` of all :attr:`stepped` is the average. The input of ``averages`` is the
        mean over the group's data ranks. If nothing is sharded (stage 0), it is the gradient of
        this rank, and ``averages`` also cover the ranks of the group.
        """
        ...

    def step(self) -> None:
        """Let the optimizer step with the present gradients, and update the model's weights."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients, also those of earlier micro-batches."""
        ...

    def reshard(self) -> None:
        """Bring every parameter into its sharded form, and free gathered copies."""
        ...

    def evaluating(self, *, full_model: bool) -> AbstractContextManager[Callable[[], None]]:
        """A context without gradients in which several forward passes may run interleaved. Yields a
        function to call before a pass continues. ``full_model``: whether guests run, too.
        """
        ...

    def local_weight(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a held parameter in float32. Collective in the group."""
        ...

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterable[Piece]:
        """Return the elements of ``tensor``, which has the shape of ``stepped[key].tensor``, as
        pieces of parameters.
        """
        ...

    def weights_changed(self) -> None:
        """Update the model after :attr:`stepped` was changed from outside. Collective in the
        group.
        """
        ...

    def enter_phase(self, layout: Layout) -> None:
        """Build blocks that the group does not hold completely again, for ``layout``.

        Parameters that the group holds stay the same objects. The values of copies are undefined.
        """
        ...


def parameters_of(module: nn.Module, layout: Layout, group: int) -> dict[str, nn.Parameter]:
    """Return the parameters of the module of ``group`` by the layout's names, frozen copies too.

    A quantised copy has two parameters, whose names end in ":q" and ":s".
    """
    infos = layout.parameters_at(group)
    return {infos[path].name if path in infos else path: p for path, p in module.named_parameters()}


def frozen_copies(store: GroupStore) -> dict[str, nn.Parameter]:
    """Return the frozen copies of this rank by name."""
    if not store.layout.keeps_frozen:
        return {}
    everything = parameters_of(store.module, store.layout, store.context.at.sdp)
    return {name: p for name, p in everything.items() if name not in store.parameters}


@contextmanager
def optimizer_steps(store: GroupStore) -> Iterator[None]:
    """A context in which torch's optimizer may step on :attr:`GroupStore.stepped`.

    Raises:
        ConfigError: The optimizer needs whole matrices and cannot step on shards.
    """
    optimizer, needs_whole = store.optimizer, store.context.needs_whole_matrices
    is_whole = needs_whole and store.context.shards == 1
    with stepped_by_engine(optimizer), on_local_tensors(optimizer) if is_whole else nullcontext():
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if not needs_whole or is_whole or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} needs whole matrices, and cannot step on shards; use "
                "zero_optimization.stage 0, or an optimizer that steps on single elements, such as AdamW"
            ) from error


def materialise_state(store: GroupStore) -> None:
    """Create the optimizer state that the first step would create. No weight changes."""
    groups = store.optimizer.param_groups
    kept = [group["params"] for group in groups]
    for index, group in enumerate(groups):
        # DeepSpeed gives the optimizer its tensors only during a step.
        group["params"] = [one.tensor for one in store.stepped.values() if one.group == index]
    try:
        with optimizer_steps(store):
            optimizer_state.materialise_state(store.optimizer)
    finally:
        for group, members in zip(groups, kept, strict=True):
            group["params"] = members
