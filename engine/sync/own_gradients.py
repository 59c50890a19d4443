"""Takes the gradient of a holder group before :class:`GradientSync` averages it with those of the
other holders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.mesh import Coordinates
from ..distributed.tensor_collectives import TensorRanks
from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic
from ..placement.layout import Layout
from .noise import MEAN, OWN, Moments, NoiseMeter

FLOAT32 = 4


class OwnGradients(NoiseMeter):
    """Measures the noise of units on a rank whose gradients :class:`GradientSync` averages.

    Args:
        layout: the layout of the full model.
        parameters: this rank's trained parameters by name.
        at: the coordinates of this rank.
        device: where the sums are needed.
        traffic: counts the bytes sent.
        moments: returns the optimizer's second moments of a parameter.
        inside: the ranks that replicate this group's parameters, if there are several. Their
            gradients are first summed, because a group's gradient is the mean over its ranks.
        tensor_ranks: the ranks over which shares of gradients are summed.
        sharded: whether the ranks of a group have different elements.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        at: Coordinates,
        device: torch.device,
        traffic: Traffic,
        moments: Callable[[str], Moments | None],
        *,
        inside: dist.ProcessGroup | None = None,
        tensor_ranks: TensorRanks | None = None,
        sharded: bool,
    ):
        super().__init__(layout, device)
        self._infos, self._at, self._mesh = layout.parameters, at, layout.mesh
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters, self._traffic, self._moments = parameters, traffic, moments
        self._inside, self._tensor_ranks = inside, tensor_ranks
        self._counts_group = sharded or at.fsdp == 0  # other ranks have copies
        self._counted = [
            name
            for name, info in layout.parameters.items()
            if info.trainable and layout.counts_norm(info, at, sharded=sharded)
        ]
        # Without these two, a gradient with one holder is that of the whole group.
        complete = inside is None and tensor_ranks is None
        self._alone = [name for name in self._counted if complete and not self.measures(self._infos[name].unit)]
        self._before: dict[str, torch.Tensor] = {}  # their gradients up to the micro-batch before
        self._noted = 0  # micro-batches
        self._shares: list[tuple[str, torch.Tensor]] = []  # gradients of which this rank has a share

    def note(self, parameters: Sequence[nn.Parameter], divided: torch.Tensor) -> None:
        """Take the gradients of a bucket before they are averaged.

        Args:
            parameters: the bucket's parameters.
            divided: their gradients end to end, divided by the number of ranks that average.
        """
        infos = [self._infos[self._names[id(parameter)]] for parameter in parameters]
        if not infos or not self.measures(infos[0].unit):
            return
        if self._inside is not None:
            ranks = dist.get_world_size(self._inside)
            self._traffic.record("inside groups", "all_reduce", divided.nbytes, ranks)
            divided = divided.to(self._device, copy=True)  # the gradients may be on the host
            dist.all_reduce(divided, group=self._inside)
        parts = divided.split([local_tensor(parameter).numel() for parameter in parameters])
        for info, part in zip(infos, parts, strict=True):
            if self._tensor_ranks is not None and info.tp_dim is None:
                self._shares.append((info.name, part.clone()))
            elif self._counts_group:
                self._add_own(info.name, part)

    def _add_own(self, name: str, part: torch.Tensor) -> None:
        # ``part`` is F·g_w / R, and F‖g_w‖² is wanted.
        unit = self._infos[name].unit
        factor = self.ranks[unit] ** 2 / self._mesh.size(self._at.sdp)
        self.add(OWN, unit, part, factor, self._moments(name))

    def note_micro_batch(self) -> None:
        """Take what the last micro-batch, if any, has added to gradients with one holder."""
        if not self.compares_micro_batches or all(self._parameters[name].grad is None for name in self._alone):
            return
        self._noted += 1
        factor = float(self.micro_batches**2 * self._mesh.size(self._at.sdp))
        for name in self._alone:
            gradient = self._parameters[name].grad
            if gradient is not None:
                now = local_tensor(gradient).detach()
                added = now - self._before[name] if name in self._before else now
                self.add(OWN, self._infos[name].unit, added, factor, self._moments(name))
                self._before[name] = now.clone()

    def finish(self) -> None:
        """After the last bucket, take the last micro-batch, and sum shares of gradients."""
        self.note_micro_batch()
        if self._tensor_ranks is None or not self._shares:
            return
        shares, self._shares = self._shares, []
        whole = torch.cat([share for _, share in shares])
        self._traffic.record("inside groups", "all_reduce", whole.nbytes, self._tensor_ranks.size)
        dist.all_reduce(whole, group=self._tensor_ranks.group)
        if self._counts_group and self._at.tp == 0:
            for (name, _), part in zip(shares, whole.split([share.numel() for _, share in shares]), strict=True):
                self._add_own(name, part)

    def take(self) -> torch.Tensor:
        for name in self._counted:
            gradient = self._parameters[name].grad
            if gradient is not None:
                self.add(MEAN, self._infos[name].unit, gradient, 1.0, self._moments(name))
        if self._noted != self.micro_batches:  # FSDP2 has not reduced every micro-batch
            self.forget({self._infos[name].unit for name in self._alone})
        return super().take()

    def drop(self) -> None:
        super().drop()
        self._shares, self._before, self._noted = [], {}, 0

    def planned_traffic(self, world_size: int) -> Traffic:
        traffic = super().planned_traffic(world_size)
        for name, parameter in self._parameters.items():
            info, nbytes = self._infos[name], local_tensor(parameter).numel() * FLOAT32
            if info.trainable and self.measures(info.unit):
                if self._inside is not None:
                    traffic.record("inside groups", "all_reduce", nbytes, dist.get_world_size(self._inside))
                if self._tensor_ranks is not None and info.tp_dim is None:
                    traffic.record("inside groups", "all_reduce", nbytes, self._tensor_ranks.size)
        return traffic
