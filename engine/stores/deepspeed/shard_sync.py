"""The averages of gradient shards with the other holders, and their early start during backward.

:mod:`~sdp.engine.backends.deepspeed.partitions` says which rank has which interval of a bundle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...distributed.mesh import Mesh
from ...distributed.traffic import Traffic
from .partitions import Bundle, Shared, stretches


class Stretch(NamedTuple):
    """Elements of this rank's partition of a bundle: the bundle's index, the first element, and
    their number.
    """

    bundle: int
    at: int
    numel: int


class ShardSync:
    """Averages the reduced gradients of one rank's partitions with the other holders.

    It counts each element once in the gradient norm. All-reduces are asynchronous: those of a unit
    overlap with the preparation and the all-reduces of the next ones.

    ``here`` gives the index on this rank of every bundle of the full model, or None.
    ``communicators`` has the communicators by their ranks.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        here: Sequence[int | None],
        stage: int,
        mesh: Mesh,
        rank: int,
        communicators: dict[tuple[int, ...], dist.ProcessGroup],
        traffic: Traffic,
        all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], Any],
    ):
        self._traffic, self._all_reduce = traffic, all_reduce
        self._communicators, self._rank = communicators, rank
        # By index, in the order of launch, which is the same on all ranks.
        self._plan: dict[int, tuple[float, list[Shared]]] = {}
        self._works: list[Any] = []
        for bundle, index in reversed(list(zip(bundles, here, strict=True))):  # in the order of backward
            if index is None:
                continue
            weight = 1 / len(bundle.holders)
            mine = [s for s in stretches(bundle, stage, mesh) if rank in s.ranks]
            self._plan[index] = (weight, mine)

    @property
    def order(self) -> list[int]:
        """Indices in the order in which all ranks launch."""
        return list(self._plan)

    def launch(self, index: int, gradient: torch.Tensor) -> None:
        """Start to average a bundle's reduced gradient over all data ranks of the holders, in
        place.
        """
        weight, mine = self._plan[index]
        if weight != 1.0:
            gradient.mul_(weight)
        for stretch in mine:
            if len(stretch.ranks) > 1:
                part = gradient.narrow(0, stretch.at, stretch.length)
                self._traffic.record("between groups", "all_reduce", part.nbytes, len(stretch.ranks))
                self._works.append(self._all_reduce(part, self._communicators[stretch.ranks]))

    def finish(self) -> None:
        """Wait for all launched all-reduces."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def abandon(self) -> None:
        """Forget launched all-reduces without waiting, because another rank may have failed."""
        self._works.clear()

    def parts(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of this rank's partitions without padding."""
        return [gradients[index].narrow(0, at, numel) for index, at, numel in self.held()]

    def held(self) -> Iterator[Stretch]:
        """This rank's elements, without padding."""
        return (Stretch(index, each.at, each.length) for index, (_, mine) in self._plan.items() for each in mine)

    def counted(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of the averaged gradients that this rank, and no other, counts in the global
        norm.
        """
        return [gradients[index].narrow(0, at, numel) for index, at, numel in self.held_first()]

    def held_first(self) -> Iterator[Stretch]:
        """The elements that this rank, and no other, counts."""
        return (
            Stretch(index, each.at, each.length)
            for index, (_, mine) in self._plan.items()
            for each in mine
            if each.ranks[0] == self._rank
        )

    def stretches_here(self) -> list[Shared]:
        """Return the stretches that :meth:`launch` averages, of all bundles."""
        return [stretch for _, mine in self._plan.values() for stretch in mine]


class EarlyLaunch:
    """Launches averages while backward still runs (ZeRO 3).

    A bundle is ready once its last partition is reduced inside the group. All ranks launch in the
    same order, so a ready bundle waits for those before it.
    """

    def __init__(
        self, sync: ShardSync, members: Sequence[Sequence[torch.Tensor]], numels: Sequence[int], device: torch.device
    ):
        """``members`` and ``numels``: parameters and partition size of each bundle, in partition
        order.
        """
        self._sync, self._numels, self._device = sync, numels, device
        self._index_of = {
            id(parameter): (index, position)
            for index, group in enumerate(members)
            for position, parameter in enumerate(group)
        }
        self._starts: list[list[int]] = []
        for group in members:
            sizes = [parameter.ds_tensor.numel() for parameter in group]  # type: ignore[attr-defined]
            self._starts.append([0, *itertools.accumulate(sizes)][:-1])
        self._missing: list[set[int]] | None = None
        self._flats: dict[int, torch.Tensor] = {}
        self._next = 0

    def arm(self) -> None:
        """Launch averages during the next backward pass, which is the last one before the step."""
        self._sync.finish()  # an earlier pass may have launched averages; this pass adds to its gradients
        self._missing, self._flats, self._next = [set(range(len(starts))) for starts in self._starts], {}, 0

    def ready(self, parameter: torch.Tensor, partition: torch.Tensor | None) -> None:
        """Take this rank's part of a reduced gradient (None if only padding); launch what is
        ready.
        """
        if self._missing is None:
            return
        index, position = self._index_of[id(parameter)]
        if not self._missing[index]:
            raise RuntimeError(
                "a gradient was reduced twice in one backward pass; recompute activations without reentrant checkpoints"
            )
        if index not in self._flats:
            self._flats[index] = torch.zeros(self._numels[index], dtype=torch.float32, device=self._device)
        if partition is not None:
            at = self._starts[index][position]
            self._flats[index][at : at + partition.numel()].copy_(partition.view(-1))
        self._missing[index].discard(position)
        order = self._sync.order
        while self._next < len(order) and not self._missing[order[self._next]]:
            self._sync.launch(order[self._next], self._flats[order[self._next]])
            self._next += 1

    def take(self) -> dict[int, torch.Tensor]:
        """Return the gradients of the launched bundles, by index, and reset."""
        launched = {index: self._flats[index] for index in self._sync.order[: self._next]}
        for flat in launched.values() if self._device.type == "cuda" else ():
            flat.record_stream(torch.cuda.current_stream())  # it was made on DeepSpeed's reduction stream
        self.drop()
        return launched

    def drop(self) -> None:
        """Reset after a failed backward pass, or after gradients were dropped."""
        self._missing, self._flats, self._next = None, {}, 0
