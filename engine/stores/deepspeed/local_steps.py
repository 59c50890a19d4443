"""Local steps under DeepSpeed: steps of a group alone, and outer steps on what ZeRO has
partitioned.

The outer steps work on boxes. At stage 0 a box is a whole parameter, or its float32 copy. At stages
1 to 3 it is a view of a flat partition. It has elements of one parameter that one rank of every
holder has, and they form a box in the parameter's shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...backend import GroupPart, PendingUpdate
from ...placement.buckets import Bucket
from ...placement.tensor_info import TensorInfo
from ...sync.outer import OuterSteps
from ..local_steps import ShardedLocalSteps
from .base import DeepSpeedBase
from .optimizer import local_part
from .partitions import Bundle, boxes, pieces_of, stretches
from .private import logged_all_reduce


@dataclass(frozen=True)
class Box:
    """Elements of a parameter or slice that this rank averages with the other holders.

    Attributes:
        name: the parameter or slice.
        start: the index of the first element, in memory order.
        offsets: the position of the first element, by dimension.
        sizes: the shape.
        ranks: the ranks that have these elements and average them, this one included.
        bundle: the index of the flat partition, or None for a whole parameter.
        at: the index of the first element in the partition.
    """

    name: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    bundle: int | None = None
    at: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def find_boxes(backend: DeepSpeedBase) -> dict[str, Box]:
    """Return the boxes of this rank's trained parameters by key, in one order for all ranks."""
    infos = backend.layout.parameters
    if backend.zero is None:
        held = [info for info in infos.values() if info.trainable and backend.at.sdp in info.holders]
        return {info.name: _whole(backend, info) for info in held}
    found: dict[str, Box] = {}
    for index, bundle in enumerate(backend.bundles):
        found |= _boxes_of(backend, bundle, backend.stage, index)
    return found


def find_untrained_boxes(backend: DeepSpeedBase) -> dict[str, Box]:
    """Return the boxes of the parameters that the optimizer does not have, by key."""
    found: dict[str, Box] = {}
    for name in backend.parameters:
        info = backend.layout.parameters[name]
        if not info.trainable and backend.stage == 3:
            found |= _boxes_of(backend, Bundle(info.unit, 0, info.holders, (name,), (info.numel,)), 3, None)
        elif not info.trainable:
            found[name] = _whole(backend, info)
    return found


def _whole(backend: DeepSpeedBase, info: TensorInfo) -> Box:
    ranks = tuple(chain(*map(backend.layout.mesh.ranks_of, info.holders)))
    return Box(info.name, 0, (0,) * len(info.shape), tuple(info.shape), ranks)


def _boxes_of(backend: DeepSpeedBase, bundle: Bundle, stage: int, index: int | None) -> dict[str, Box]:
    """Return the boxes of this rank's partition of a bundle.

    All holders cut them in the same way.
    """
    found: dict[str, Box] = {}
    pieces = pieces_of(bundle, stage, backend.ranks_inside, backend.rank_inside)
    for stretch in stretches(bundle, stage, backend.layout.mesh):
        if backend.rank not in stretch.ranks:
            continue
        begin = stretch.at
        for piece in pieces:
            first, last = max(piece.at, begin), min(piece.at + piece.length, begin + stretch.length)
            start, shape = piece.start + first - piece.at, backend.layout.parameters[piece.name].shape
            for offsets, sizes, numel in boxes(start, last - first, shape) if first < last else ():
                found[f"{piece.name}[{start}]"] = Box(piece.name, start, offsets, sizes, stretch.ranks, index, first)
                start, first = start + numel, first + numel
    return found


class DeepSpeedLocalSteps(ShardedLocalSteps):
    """The local steps of one rank under DeepSpeed."""

    _backend: Any  # the backend of this package

    def _make_outer_steps(self) -> OuterSteps:
        backend = self._backend
        self._is_stale = False  # whether the model has other weights than the float32 ones
        buckets, communicators = self._messages()
        return OuterSteps(
            self.sync,
            buckets,
            backend.local_weight,
            list(self.boxes),
            self._fragments_of_boxes(),
            communicators,
            counts=self._counts,
            counts_once=lambda key: self._counts(key) and self.boxes[key].ranks[0] == backend.rank,
            device=backend.device,
            traffic=backend.traffic,
            sum_over_ranks=backend.all_reduce_control,
            clock=backend.clock,
            is_slice=lambda key: self._layout.parameters[self._backend.spot_of(key).name].cut is not None,
            all_reduce=logged_all_reduce,
        )

    def _messages(self) -> tuple[list[Bucket], Mapping[tuple[int, ...], dist.ProcessGroup]]:
        """Return the messages of an average, and the communicators by the ranks or the holders of a
        message.
        """
        backend = self._backend
        self.boxes: dict[str, Box] = backend.boxes
        if backend.zero is None:
            return self._layout.buckets(lambda _: False), backend.communicators.holders
        return self._buckets_of_partitions(self._fragments_of_boxes()), backend.between

    def _fragments_of_boxes(self) -> dict[str, int]:
        return {key: self._fragments[box.name] for key, box in self.boxes.items()}

    def _buckets_of_partitions(self, fragments: Mapping[str, int]) -> list[Bucket]:
        """Return a message for the boxes of each stretch.

        Its ranks stand for the holders: one rank of each.
        """
        together: dict[tuple[Any, ...], list[str]] = {}
        for key, box in self.boxes.items():
            together.setdefault((box.bundle, box.ranks, fragments[key]), []).append(key)
        return [Bucket(ranks, tuple(keys)) for (_, ranks, _), keys in together.items()]

    def _counts(self, name: str) -> bool:
        """Return whether this rank counts a box in the norm over its group."""
        return self._backend.zero is not None or self._at.fsdp == 0

    # -- steps -------------------------------------------------------------------------------------

    def step(self, loss: torch.Tensor, scheduler: Any, count: float | None = None) -> PendingUpdate:
        """Clip by the norm of this group's gradient, and let DeepSpeed step the group. Collective.

        DeepSpeed advances the schedule in a step, but not in one that it skips. The schedule of a
        group that skips is advanced here, so all groups have the same learning rate.
        """
        backend, norm = self._backend, self._backend.norm_in_group()
        outcome = self._share_with_differences(loss.item(), norm)
        skipped_before = backend.deepspeed.skipped_steps
        if math.isfinite(norm):
            backend.update(backend.averaged, norm, scheduler)
        else:
            backend.skip_update(norm)
        if scheduler is not None and backend.deepspeed.skipped_steps > skipped_before:
            scheduler.step()
        return outcome

    def _share_with_differences(self, loss: float, norm: float) -> PendingUpdate:
        """Check DeepSpeed's gradients, and return the outcome of the step. Collective.

        Both are in one message.
        """
        backend, usage = self._backend, self._backend.usage
        differences = usage.differences() if usage is not None else []
        summary = self.summary(loss, norm)
        totals = torch.tensor([*summary, *differences], dtype=torch.float64, device=backend.device)
        wait = backend.start_control(totals)
        if usage is not None:
            wait()  # before the update, so that all ranks raise an error together
            usage.check(totals[len(summary) :].tolist())
        return self._pending(totals[: len(summary)], wait)

    def _send_anchors(self, names: Collection[str]) -> None:
        """Write the new weights to the model, and refresh the frozen copies of ``names``.

        Collective.
        """
        infos = self._layout.parameters
        sent = {name for name in names if name in infos and infos[name].trainable}
        concerned = any(name in sent for refresh in self._layout.refreshes for name in refresh.names)
        if concerned and self.sync.overlap:
            self.send_all_anchors(sent)
            return
        self._write_weights()
        if concerned:
            self._backend.send_copies(sent, at_once=False)

    def send_all_anchors(self, names: Collection[str]) -> None:
        """Refresh the frozen copies of ``names`` from the anchors, where weights may differ from
        them. Collective.
        """
        with self.outer.swapped():
            self._write_weights()
            self._backend.send_copies(names, at_once=True)
        self._write_weights()

    def _write_weights(self) -> None:
        """Copy the float32 weights to the model's parameters. Collective inside the group."""
        self._backend.write_weights()
        self._is_stale = False

    def freshen(self) -> None:
        """Write the weights after an error inside :meth:`anchored`. Collective inside the group."""
        if self._is_stale and not self.outer.is_swapped:
            self._write_weights()

    # -- the full model ----------------------------------------------------------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which weights and buffers of the module are the anchors."""
        if self.outer.is_swapped:
            yield
            return
        with super().anchored():
            self._write_weights()
            self._is_stale = True
            yield
        self._write_weights()

    # -- state -------------------------------------------------------------------------------------

    def common_state(self) -> tuple[Mapping[str, torch.Tensor], Optimizer]:
        return self.outer.anchors, self.outer.optimizer

    def untrained(self) -> Mapping[str, torch.Tensor]:
        backend = self._backend
        flats = {key: local_part(backend.parameters[box.name]) for key, box in backend.untrained_boxes.items()}
        return {
            key: flats[key].detach().view(-1)[box.at : box.at + box.numel].view(box.sizes)
            for key, box in backend.untrained_boxes.items()
        }

    def groups_here(self) -> Iterator[GroupPart]:
        at, swapped = self._at, self.outer.is_swapped
        part = self._backend.only_part()
        yield part._replace(
            group=at.sdp,
            position=f"{at.sdp}.{at.fsdp}.{at.tp}",
            weights=self.outer.anchors if swapped else part.weights,
            errors=self.outer.errors,
            before=self.outer.travelling[1],
            buffers=self.buffers if swapped else self._buffers_here(),
        )
