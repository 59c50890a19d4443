"""Local steps: the schedule of averages, the anchors, and the outer steps.

A round has H steps (``sdp.sync.every``). The model is divided into P fragments. In each round,
every fragment is averaged once: fragment p after the steps t with (t + p·H/P) mod H = 0, where t
counts from 1 after ``start_after`` (Streaming DiLoCo, arXiv 2501.18512).

The anchor of a unit is the unit's weights after the last average. All holders have the same anchor.
In an outer step, the mean of the holders' changes (anchor − weights) is the gradient with which the
outer optimizer updates the anchor. Then every holder continues from the new anchor.

The holders of a unit send their changes in one of these formats:

- "none": float32, summed by an all-reduce.
- "bf16": bfloat16, summed by an all-reduce.
- "int8": integers with one float32 scale per row. An all-reduce cannot add integers of different
  scales, so every holder gathers the integers of all holders and adds them in one order. So all
  holders get the same bits. A holder adds the rounding error of a change to its next change (error
  feedback, arXiv 1901.09847).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..config.method import SyncSection
from ..distributed.collectives import Traffic
from ..distributed.mesh import Holders
from ..optim.clip import squared_norm
from ..placement.layout import Layout
from ..placement.placement import Bucket
from ..placement.units import SHARED
from ..stores.store import Messages

Compression = Literal["none", "bf16", "int8"]
LARGEST = 127


class ReducedExchange:
    """Sums tensors over ranks with one all-reduce in ``dtype``: the formats "none" and "bf16"."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        traffic: Traffic,
        messages: Messages,
    ):
        self._shapes = [tensor.shape for tensor in tensors]
        self._buffer = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
        self._work: Any = None
        if self._buffer.numel():
            traffic.record("between groups", "all_reduce", self._buffer.nbytes, dist.get_process_group_ranks(group))
            self._work = messages.all_reduce(self._buffer, group)

    def wait(self) -> list[torch.Tensor]:
        """Wait for the all-reduce, and return the sums in the shapes of the tensors."""
        if self._work is not None:
            self._work.wait()
        flat = self._buffer.float()
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class GatheredExchange:
    """Sums tensors over ranks in the format "int8".

    The ranks gather integers and scales, and every rank adds them in rank order. The tensors
    ``errors`` are overwritten with this rank's rounding errors.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        errors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        traffic: Traffic,
        messages: Messages,
    ):
        self._shapes = [tensor.shape for tensor in tensors]
        self._ranks = dist.get_world_size(group)
        integers, scales = [], []
        for tensor, error in zip(tensors, errors, strict=True):
            rows, scale = quantise(tensor)
            error.copy_(tensor - restore(rows, scale, tensor.shape))
            integers.append(rows.reshape(-1))
            scales.append(scale)
        self._sizes = [len(scale) for scale in scales]
        mine, own_scales = torch.cat(integers), torch.cat(scales)
        self._works: list[Any] = []
        self._integers = mine.new_empty((self._ranks, len(mine)))
        self._scales = own_scales.new_empty((self._ranks, len(own_scales)))
        for all_of, part in ((self._integers, mine), (self._scales, own_scales)):
            if part.numel():
                traffic.record("between groups", "all_gather", all_of.nbytes, dist.get_process_group_ranks(group))
                work = messages.all_gather(all_of.view(-1), part, group)
                self._works.append((work, part))  # the part must live until it is sent

    def wait(self) -> list[torch.Tensor]:
        """Wait for the collectives, and return the sums in the shapes of the tensors."""
        for work, _ in self._works:
            work.wait()
        totals = [torch.zeros(shape, device=self._scales.device) for shape in self._shapes]
        for integers, scales in zip(self._integers, self._scales, strict=True):
            parts = integers.split([shape.numel() for shape in self._shapes])
            for total, part, scale in zip(totals, parts, scales.split(self._sizes), strict=True):
                total += restore(part, scale, total.shape)
        return totals


def quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor to int8 integers (rows, columns), and one scale for each row.

    A tensor with fewer than two dimensions is one row.
    """
    rows = _rows(tensor)
    scales = rows.abs().amax(dim=1) / LARGEST if rows.numel() else rows.new_zeros(len(rows))
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / divisors[:, None]).round().to(torch.int8), scales


def restore(integers: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the float32 values of integers and scales that :func:`quantise` has made."""
    if not shape.numel():
        return torch.zeros(shape, device=scales.device)
    return (integers.view(len(scales), -1).float() * scales[:, None]).view(shape)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 and tensor.numel() else tensor.reshape(1, -1)


class Rounds:
    """The schedule of local steps: after which step each fragment of the model is averaged.

    Steps are numbered from 1, as ``global_steps`` after a step. With ``sdp.sync.overlap``, an
    average is applied some steps after it has started.
    """

    def __init__(self, sync: SyncSection):
        self._sync = sync

    @property
    def fragments(self) -> range:
        return range(self._sync.fragments)

    def is_local(self, step: int) -> bool:
        """Return whether groups take this step on their own, without averaging gradients."""
        return step > self._sync.start_after

    def starting(self, step: int) -> int | None:
        """Return the fragment (part of the model) whose average starts after ``step``, or None."""
        local, every, count = step - self._sync.start_after, self._sync.every, self._sync.fragments
        if local <= 0 or local % (every // count):
            return None
        return -local // (every // count) % count

    def arriving(self, step: int) -> int | None:
        """Return the fragment (part of the model) that gets its average after ``step``, or None."""
        return self.starting(step - self._sync.overlap)

    def under_way(self, step: int) -> int | None:
        """Return the fragment whose average has started but is not applied after ``step``, or None.

        A fragment is a part of the model. At most one average is under way at a time.
        """
        started = (self.starting(step - age) for age in range(self._sync.overlap))
        return next((fragment for fragment in started if fragment is not None), None)

    def steps_alone(self, step: int, fragment: int) -> int:
        """Return the number of steps since the last average of a fragment of the model started."""
        if not self.is_local(step):
            return 0
        local, every = step - self._sync.start_after, self._sync.every
        since = (local + fragment * (every // self._sync.fragments)) % every
        return min(since, local)


def fragments_of(layout: Layout, fragments: int) -> dict[str, int]:
    """Map the name of every tensor of the layout to its fragment.

    A fragment is the part of the model that is averaged at the same time. Block i belongs to
    fragment i mod ``fragments``. What is in no block belongs to fragment 0.
    """
    of_unit, of_sliced = {SHARED: 0}, {}
    for unit in layout.units:
        block = layout.block_of(unit)
        index = layout.blocks.index(block) if block else 0
        of_unit[unit.name] = index % fragments
        for part in (*unit.slices, *unit.buffers):
            if part.dim is not None:
                of_sliced[part.parameter] = index % fragments
    tensors = {**layout.parameters, **layout.buffers}
    return {name: of_sliced.get(info.canonical, of_unit.get(info.unit, 0)) for name, info in tensors.items()}


class OuterFacts(NamedTuple):
    """What is reported about an outer step, in which a fragment of the model is averaged.

    Attributes:
        fragment: the index of the fragment.
        drift: how far groups moved since the last average: the norm of (weights − anchors) over
            all groups, divided by the norm of the anchors.
        gradient_norm: the norm of the averaged change, which is the outer optimizer's gradient.
    """

    fragment: int
    drift: float
    gradient_norm: float


def make_outer_optimizer(sync: SyncSection, anchors: Sequence[torch.Tensor]) -> torch.optim.SGD:
    """Make the outer optimizer, which updates the anchors (``sdp.sync.outer_optimizer``)."""
    return torch.optim.SGD(list(anchors) or [torch.zeros(0)], **sync.outer_optimizer.params.model_dump())


class OuterSteps:
    """One rank's anchors, and the outer steps that update them.

    :meth:`start` begins to average a fragment of the model among holders. :meth:`arrive` applies
    the average: the outer optimizer updates the anchors, and the group continues from them.

    Args:
        sync: the section ``sdp.sync`` of the configuration.
        buckets: the parameters that are averaged in one message, in the same order on all ranks.
            All parameters of a bucket belong to the same fragment.
        weights: given a name, returns this rank's shard of a trained parameter. A shard may have
            moved in memory by the next call.
        names: the trained parameters that this rank holds.
        fragments: the fragment of each parameter, by name.
        communicators: for each set of holders, the process group that averages. A set is missing if
            this rank is its only rank.
        counts: given a name, whether this rank adds its shard to a norm that counts the parameter
            once for every holder.
        counts_once: given a name, whether this rank adds its shard to a norm that counts the
            parameter only once.
        sum_over_ranks: sums a float64 tensor over all ranks, in place.
        clock: measures the time spent waiting, in seconds.
        messages: starts the messages between groups.
        is_slice: given a name, whether it is a slice of a parameter. Checkpoints join the optimizer
            state of all slices, so slices with one holder need state, too.
    """

    def __init__(
        self,
        sync: SyncSection,
        buckets: Sequence[Bucket],
        weights: Callable[[str], torch.Tensor],
        names: Sequence[str],
        fragments: Mapping[str, int],
        communicators: Mapping[Holders, dist.ProcessGroup],
        *,
        counts: Callable[[str], bool],
        counts_once: Callable[[str], bool],
        device: torch.device,
        traffic: Traffic,
        sum_over_ranks: Callable[[torch.Tensor], None],
        clock: Callable[[], float] = time.perf_counter,
        messages: Messages = Messages(),  # noqa: B008 (it has no state)
        is_slice: Callable[[str], bool] = lambda _: False,
    ):
        self._sync, self._weights, self._names = sync, weights, list(names)
        self._counts, self._counts_once, self._is_slice = counts, counts_once, is_slice
        self._device, self._traffic, self._sum = device, traffic, sum_over_ranks
        self._clock, self._messages = clock, messages
        self.exposed_seconds = 0.0
        self._under_way: tuple[int, list[Average]] | None = None
        self._buckets: dict[int, list[tuple[tuple[str, ...], Holders, dist.ProcessGroup | None]]] = {}
        held_names = set(self._names)
        for bucket in buckets:
            held = tuple(name for name in bucket.names if name in held_names)
            if held:
                group = communicators.get(bucket.holders) if len(bucket.holders) > 1 else None
                self._buckets.setdefault(fragments[held[0]], []).append((held, bucket.holders, group))
        home = device if sync.offload == "none" else torch.device("cpu")
        self.anchors = {name: nn.Parameter(_copy(weights(name), home), requires_grad=False) for name in self._names}
        self.optimizer = make_outer_optimizer(sync, [*self.anchors.values()])
        self.errors: dict[str, torch.Tensor] = {}
        if sync.compression == "int8":
            held = [bucket for of_fragment in self._buckets.values() for bucket in of_fragment]
            shared = [name for names, holders, _ in held if len(holders) > 1 for name in names]
            self.errors = {name: torch.zeros_like(self.anchors[name]) for name in shared}
        self.is_swapped = False

    # -- averages ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, fragment: int) -> None:
        """Start to average a fragment of the model. All ranks call this after the same step."""
        assert self._under_way is None, "an average has arrived before the next one starts"
        averages = []
        for names, holders, group in self._buckets.get(fragment, ()):
            before = [self._weights(name).clone() for name in names] if self._sync.overlap else None
            changes = self._changes(names) if group is not None or before is not None else []
            exchange = self._exchange(names, changes, group) if group is not None else None
            keeps = self._keeps_weights(holders)
            averages.append(Average(names, changes if exchange is None else [], exchange, before, keeps))
        self._under_way = fragment, averages

    def _exchange(
        self, names: Sequence[str], changes: list[torch.Tensor], group: dist.ProcessGroup
    ) -> ReducedExchange | GatheredExchange:
        shares = torch._foreach_div(changes, dist.get_world_size(group))
        changes.clear()
        if self._sync.compression == "int8":
            errors = [self.errors[name] for name in names]
            shares = [share + error.to(self._device) for share, error in zip(shares, errors, strict=True)]
            return GatheredExchange(shares, errors, group, self._traffic, self._messages)
        dtype = torch.bfloat16 if self._sync.compression == "bf16" else torch.float32
        return ReducedExchange(shares, group, dtype, self._traffic, self._messages)

    @torch.no_grad()
    def arrive(self) -> OuterFacts:
        """Wait for the average that was started, and take the outer step with it. Collective."""
        assert self._under_way is not None, "an average is started before it arrives"
        fragment, averages = self._under_way
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._under_way = None
        for average in averages:  # bucket by bucket, so that only one needs memory for the optimizer's step
            means = self._means(average)
            totals += self._squared_norms(average, means)
            self._step(average, means)
        self._sum(totals)
        drift, anchor, gradient = totals.sqrt().tolist()
        return OuterFacts(fragment, drift / anchor if anchor else 0.0, gradient)

    def _means(self, average: Average) -> list[torch.Tensor]:
        started = self._clock()
        means = average.means() or self._changes(average.names)
        self.exposed_seconds += self._clock() - started
        return means

    def _keeps_weights(self, holders: Holders) -> bool:
        return len(holders) == 1 and self._sync.single_holder == "skip"

    def _changes(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [self.anchors[name].to(self._device) - self._weights(name) for name in names]

    def _step(self, average: Average, means: list[torch.Tensor]) -> None:
        """Let the outer optimizer step on a bucket's anchors, from which the group continues."""
        if average.keeps_weights:
            slices = [self.anchors[name] for name in average.names if self._is_slice(name)]
            self._step_optimizer(slices, [torch.zeros_like(anchor) for anchor in slices])
            for name in average.names:
                self.anchors[name].copy_(self._weights(name))
        else:
            self._step_optimizer([self.anchors[name] for name in average.names], means)
            for index, name in enumerate(average.names):
                anchor, weight = self.anchors[name], self._weights(name)
                if average.before is None:
                    weight.copy_(anchor)
                else:  # keep the changes of the group while the average was under way
                    weight.copy_(anchor.to(self._device) + (weight - average.before[index]))
        average.before, average.changes = None, []

    def _step_optimizer(self, anchors: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
        for anchor, gradient in zip(anchors, gradients, strict=True):
            anchor.grad = gradient.to(anchor.device)
        self.optimizer.step()
        for anchor in anchors:
            anchor.grad = None

    def _squared_norms(self, average: Average, means: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's terms of the squared norms of drift, anchors and outer gradient."""
        names = average.names
        starts = average.before or [self._weights(name) for name in names]
        counted = [index for index, name in enumerate(names) if self._counts(name)]
        moved = [self.anchors[names[index]].to(self._device) - starts[index] for index in counted]
        anchors = [self.anchors[names[index]] for index in counted]
        once = [mean for name, mean in zip(names, means, strict=True) if self._counts_once(name)]
        norms = [squared_norm(tensors, self._device).to(self._device) for tensors in (moved, anchors, once)]
        return torch.stack(norms)

    # -- state -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the average that was started has arrived, without applying it."""
        if self._under_way is not None:
            for average in self._under_way[1]:
                average.means()

    @property
    def fragment_under_way(self) -> int | None:
        """The fragment of the model whose average was started and is not applied yet, or None."""
        return self._under_way[0] if self._under_way is not None else None

    @property
    def pending_changes(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The mean changes of an average that is not applied yet, and the weights at its start.

        Both mappings have the names of parameters as keys. A checkpoint saves the two mappings.
        """
        self.settle()
        means: dict[str, torch.Tensor] = {}
        before: dict[str, torch.Tensor] = {}
        for average in self._under_way[1] if self._under_way is not None else ():
            means |= dict(zip(average.names, average.changes, strict=True))
            before |= dict(zip(average.names, average.before or (), strict=False))
        return means, before

    @torch.no_grad()
    def restart(self, fragment: int | None) -> None:
        """Prepare to load a checkpoint that was saved while ``fragment`` was being averaged.

        The caller then fills :attr:`pending_changes` in place. If ``fragment`` is None, no average
        was under way.
        """
        self._under_way = None
        if fragment is not None:
            averages = []
            for names, holders, _ in self._buckets.get(fragment, ()):
                zeros = [torch.zeros_like(self._weights(name)) for name in names]
                starts = [zero.clone() for zero in zeros]
                averages.append(Average(names, zeros, None, starts, self._keeps_weights(holders)))
            self._under_way = fragment, averages

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the present weights to the anchors. The state of the outer optimizer stays."""
        self._under_way = None
        for name in self._names:
            self.anchors[name].copy_(self._weights(name))
        for error in self.errors.values():
            error.zero_()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the model has the anchors, and ``anchors`` has the model's weights."""
        swap(self.anchors, self._weights)
        self.is_swapped = True
        try:
            yield
        finally:
            self.is_swapped = False
            swap(self.anchors, self._weights)

    def nbytes(self) -> int:
        """Return the bytes of anchors, outer optimizer state and rounding errors on this rank."""
        state = [value for entries in self.optimizer.state.values() for value in entries.values()]
        tensors = [
            *self.anchors.values(),
            *self.errors.values(),
            *(t for t in state if isinstance(t, torch.Tensor) and t.dim()),
        ]
        return sum(tensor.nbytes for tensor in tensors)


@torch.no_grad()
def swap(anchors: Mapping[str, torch.Tensor], weights: Callable[[str], torch.Tensor]) -> None:
    """Exchange the values of ``anchors`` and of the tensors that ``weights`` returns by name."""
    for name, anchor in anchors.items():
        weight = weights(name)
        kept = weight.clone()
        weight.copy_(anchor)
        anchor.copy_(kept)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True)


@dataclass
class Average:
    """The average of a bucket of parameters, started but not applied yet.

    Attributes:
        names: the parameters of the bucket.
        changes: the changes of the parameters, unless ``exchange`` has them.
        exchange: the collective that averages the changes. None if this group is the only holder,
            or if the collective has ended.
        before: with overlap, the weights when the average started.
        keeps_weights: whether the weights become the anchors, without an outer step.
    """

    names: tuple[str, ...]
    changes: list[torch.Tensor]
    exchange: ReducedExchange | GatheredExchange | None
    before: list[torch.Tensor] | None
    keeps_weights: bool

    def means(self) -> list[torch.Tensor]:
        """Wait for the average, and return the mean changes of the holders.

        The list is empty if this group is the only holder and averages do not overlap with steps.
        Then the caller computes the changes.
        """
        if self.exchange is not None:
            self.changes, self.exchange = self.exchange.wait(), None
        return self.changes
