"""The interface of a store, which holds one rank's share of its group's subnetwork."""

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

from ..config.schema import Config
from ..distributed.collectives import TensorRanks, Traffic, all_gather_single
from ..distributed.mesh import Coordinates, Holders, Mesh
from ..distributed.process_groups import Communicators
from ..errors import ConfigError
from ..optim import optimizer_state
from ..optim.script_optimizers import on_local_tensors, stepped_by_engine
from ..placement.layout import Layout
from ..placement.placement import Bucket
from ..placement.tensor_info import TensorInfo


class Stepped(NamedTuple):
    """A tensor of weights that this rank's group holds, with its unit and holders.

    Attributes:
        tensor: the tensor, whose ``grad`` is the gradient. With FSDP2 it is one parameter. With
            DeepSpeed's ZeRO it is the float32 partition of the parameters of a unit.
        unit: the unit of the model to which the tensor belongs.
        holders: the groups that hold the unit.
        names: the names of the parameters (or slices of parameters) in the tensor.
        group: the index of the optimizer's parameter group that has the tensor. None if the
            optimizer does not have the tensor.
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
    """A rectangular part of a full model's parameter that this rank stores, for checkpoints.

    Attributes:
        info: describes the parameter (or the slice of a parameter).
        tensor: the elements, as a view of this rank's tensor.
        offset: the index of the first element in the full model's parameter.
    """

    info: TensorInfo
    tensor: torch.Tensor
    offset: tuple[int, ...]


class Messages:
    """Starts the collectives between SDP groups, and returns their work handles."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place over ``group``. Returns a work handle."""
        return dist.all_reduce(tensor, group=group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to broadcast ``tensor`` from rank ``source`` of ``group``. Returns a handle."""
        return dist.broadcast(tensor, group_src=source, group=group, async_op=True)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to gather ``part`` of all ranks of ``group`` in ``whole``. Returns a handle."""
        return all_gather_single(whole, part, group=group, async_op=True)


class DeviceMessages(Messages):
    """Starts collectives also for offloaded tensors, by way of a copy on the device.

    NCCL cannot send tensors that are in the host's memory.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is not on the device, so that only a copy of it can be sent."""
        return tensor.device.type != self._device.type

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return self.send(tensor, lambda sent: dist.all_reduce(sent, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        return self.send(tensor, lambda sent: dist.broadcast(sent, group_src=source, group=group, async_op=True))

    def send(self, tensor: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> Any:
        """Call ``start`` with ``tensor``, or with a copy on the device, to begin a collective.

        Returns a work handle. If there is a copy, ``wait()`` copies the result back to ``tensor``.
        """
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
    """What the engine knows from a store about this rank: its position, process groups and traffic.

    Attributes:
        at: the coordinates of the rank in the mesh.
        device: the device on which the rank computes.
        compute_dtype: the dtype of forward and backward.
        traffic: counts the bytes that the rank sends.
        tensor_ranks: the tensor-parallel ranks. None without tensor parallelism.
        shards: the number of shards into which :meth:`GroupStore.local_weight` cuts a parameter.
            1 means that it returns whole parameters.
        buckets: the gradients that are averaged in one message, in the same order on all ranks. A
            bucket names keys of :attr:`GroupStore.stepped`.
        messages: starts messages between groups.
        awaits_blocks: whether a block waits for new weights of its frozen copies only when it
            runs. If False, the engine waits for the weights of all copies at once.
        user_groups: for each parameter group of the optimizer, the index of the user's parameter
            group. None if the optimizer has the user's groups themselves.
        user_group_count: the number of the user's parameter groups, if ``user_groups`` is given.
        needs_whole_matrices: whether the optimizer's step depends on whole matrices.
        passes_together: how many forward passes of an evaluation may be under way at the same time.
            None means any number.
        shard_of_copy: given a whole frozen tensor, returns the shard that this rank stores.
        gather_stream: given a block, returns the CUDA stream that gathers its shards, or None.
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
        """Whether each rank of a group stores a shard of the group's state, not a full replica."""
        return self.mesh.shards(self.stage) > 1

    def counts(self, stepped: Stepped) -> bool:
        """Return whether this rank adds a tensor to the norm of its group's gradient.

        Of several ranks with equal copies, only one adds the tensor.
        """
        return (self.is_sharded or self.at.fsdp == 0) and (stepped.is_cut or self.at.tp == 0)

    def counts_once(self, stepped: Stepped) -> bool:
        """Return whether this rank adds a tensor to the norm of the full model's gradient.

        Of several holders, only one adds the tensor.
        """
        return self.counts(stepped) and stepped.holders[0] == self.at.sdp

    def start_control(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Callable[[], object]:
        """Start to all-reduce a small tensor over all ranks, in place. Collective.

        Returns:
            A function that waits until ``values`` has the result.
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
        """All-reduce a small tensor over all ranks, in place. Collective."""
        self.start_control(values, op)()

    def sum_in_group(self, values: torch.Tensor) -> None:
        """Sum a small tensor over the ranks of this group, in place. Collective in the group."""
        group = self.communicators.group
        if group is not None:
            self.traffic.record("control", "all_reduce", values.nbytes, dist.get_process_group_ranks(group))
            dist.all_reduce(values, group=group)


def make_communicators(layout: Layout, config: Config, *, alone: bool = False) -> Communicators:
    """Create all process groups of a run, and return those of this rank. Collective.

    ``alone``: whether FSDP2 wraps parameters that are not sharded.
    """
    phases = [layout.in_phase(masking) for masking in (layout.masking, *config.sdp.maskings)]
    return Communicators.build(
        layout.mesh,
        {info.holders for info in layout.parameters.values()},
        replicate_inside=config.zero_optimization.stage == 0,
        alone=alone,
        refreshes={(refresh.source, refresh.members) for phase in phases for refresh in phase.refreshes},
        local_steps=config.sdp.sync is not None,
    )


class Averages(Protocol):
    """Averages gradients among holders while a backward pass runs."""

    def arm(self) -> None:
        """From now on, average each gradient as soon as autograd has computed it."""
        ...

    def abandon(self) -> None:
        """Stop averaging, because the backward pass raised an error."""
        ...

    def finish(self) -> None:
        """Wait until the ``grad`` of every tensor is the average."""
        ...


class GroupStore(Protocol):
    """One rank's share of its group's subnetwork: weights, gradients and optimizer.

    The engine calls a store to run forward and backward, to reduce gradients inside the group, and
    to step. A store does not communicate with other groups: :mod:`sdp.engine.sync` does.
    """

    layout: Layout  # in the present phase of a schedule of maskings
    module: nn.Module  # this rank's subnetwork
    context: RankContext
    parameters: dict[str, nn.Parameter]  # the parameters that the group holds, by name
    optimizer: Optimizer  # torch's, which steps on ``stepped``

    @property
    def stepped(self) -> Mapping[str, Stepped]:
        """The tensors that the optimizer updates, and untrained parameters of the group, by key."""
        ...

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """Run the forward pass of a batch, and return ``call(module, batch)``."""
        ...

    def backward(self, loss: torch.Tensor, averages: Averages | None) -> None:
        """Accumulate the gradients of ``loss``.

        In the last micro-batch of a step, ``averages`` must be given. This object averages the
        gradients among holders, and every ``grad`` of :attr:`stepped` is then the average. The
        store first averages over the group's data ranks. At stage 0, ``averages`` does this, too.
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
        """A context without gradients, in which forward passes of several batches may take turns.

        The context yields a function, to be called before a paused pass continues. ``full_model``
        says whether the passes run the full model, or only this group's subnetwork.
        """
        ...

    def local_weight(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a held parameter in float32. Collective in the group."""
        ...

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterable[Piece]:
        """Split a tensor, shaped like ``stepped[key].tensor``, into parts of full parameters."""
        ...

    def weights_changed(self) -> None:
        """Copy the tensors of :attr:`stepped` to the model. Collective in the group.

        Call this after anything but the optimizer has changed the tensors.
        """
        ...

    def enter_phase(self, layout: Layout) -> None:
        """Change to the ``layout`` of another phase of a masking schedule.

        Blocks that the group does not hold completely are built again. Parameters that the group
        holds stay the same objects. New frozen copies have no defined values yet.
        """
        ...


def parameters_of(module: nn.Module, layout: Layout, group: int) -> dict[str, nn.Parameter]:
    """Map the names of the layout to the parameters of the ``module`` that ``group`` trains.

    Frozen copies are included. A quantised copy has two parameters: the integers, whose name ends
    in ":q", and the scales, whose name ends in ":s".
    """
    infos = layout.parameters_at(group)
    return {infos[path].name if path in infos else path: p for path, p in module.named_parameters()}


def frozen_copies(store: GroupStore) -> dict[str, nn.Parameter]:
    """Map names to this rank's frozen copies of parameters that only other groups hold."""
    if not store.layout.keeps_frozen:
        return {}
    everything = parameters_of(store.module, store.layout, store.context.at.sdp)
    return {name: p for name, p in everything.items() if name not in store.parameters}


@contextmanager
def optimizer_steps(store: GroupStore) -> Iterator[None]:
    """A context in which the store's optimizer may step. Outside, a step is refused.

    Raises ConfigError if the optimizer needs whole matrices, but the rank has shards of them.
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
    """Create the optimizer state before the first step, for a checkpoint to fill. Weights stay."""
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
