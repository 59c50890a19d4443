"""Local steps of a backend with one process per rank: inner steps, outer steps, and the anchors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..backend import CommonPart, GroupPart, LocalUpdate, PendingUpdate
from ..config.sync import SyncSection
from ..distributed.mesh import Coordinates
from ..full_model.backend_view import SubnetworkBackend
from ..full_model.buffers import agree_on_buffers, persistent_buffers
from ..optim.clip import squared_norm
from ..placement.layout import Layout
from ..sync.outer import OuterFacts, OuterSteps
from ..sync.rounds import fragments_of


class ShardedLocalSteps:
    """The local steps of one rank.

    Batch norm's running statistics have anchors too: those of a unit are averaged in its outer
    step.
    """

    def __init__(self, backend: SubnetworkBackend, sync: SyncSection):
        self.sync = sync
        self._backend = backend
        self._fragments = fragments_of(backend.layout, sync.fragments)
        self.outer = self._make_outer_steps()
        backend.agree_on_buffers()
        self.buffers = {name: buffer.clone() for name, buffer in self._buffers_here().items()}

    @property
    def _layout(self) -> Layout:
        return self._backend.layout

    @property
    def _at(self) -> Coordinates:
        return self._backend.at

    def _make_outer_steps(self) -> OuterSteps:
        backend, infos = self._backend, self._layout.parameters
        return OuterSteps(
            self.sync,
            self._layout.buckets(lambda _: False),
            backend.local_weight,
            [name for name in backend.parameters if infos[name].trainable],
            self._fragments,
            backend.communicators.holders,
            counts=self._counts,
            counts_once=self._counts_once,
            device=backend.device,
            traffic=backend.traffic,
            sum_over_ranks=backend.all_reduce_control,
            clock=backend.clock,
            is_slice=lambda key: self._layout.parameters[self._backend.spot_of(key).name].cut is not None,
        )

    def _counts(self, name: str) -> bool:
        """Return whether this rank counts its part of a parameter in the norm over its group."""
        info, at = self._layout.parameters[name], self._at
        return (self._backend.shards > 1 or at.fsdp == 0) and (info.tp_dim is not None or at.tp == 0)

    def _counts_once(self, name: str) -> bool:
        """Return whether this rank counts its part of a parameter in the norm over all groups."""
        return self._counts(name) and self._layout.parameters[name].holders[0] == self._at.sdp

    def _buffers_here(self) -> dict[str, torch.Tensor]:
        return persistent_buffers(self._backend.module, self._layout)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, loss: torch.Tensor, scheduler: Any, count: float | None = None) -> PendingUpdate:
        """Clip by the norm of this group's gradient, and take a step of its own. Collective.

        A group whose norm is NaN or infinite leaves its weights and optimizer state as they are.
        """
        backend = self._backend
        gradients = backend.gradients()
        norm = self._norm_in_group()
        is_finite = math.isfinite(norm)
        if is_finite:
            backend.clip(gradients, norm)
            backend.shard_parameters()
            with backend.stepping():
                backend.optimizer.step()
        gradients.clear()
        backend.zero_grad()
        if scheduler is not None:
            scheduler.step()
        totals = torch.tensor(self.summary(loss.item(), norm, count), dtype=torch.float64, device=backend.device)
        return self._pending(totals, backend.start_control(totals))

    def _pending(self, totals: torch.Tensor, wait: Callable[[], object]) -> PendingUpdate:
        """Return the outcome of a step. After ``wait()``, ``totals`` has the sums of all ranks."""

        def receive() -> LocalUpdate:
            wait()
            mean_loss, norms, stepped, everyone, *counts = totals.tolist()
            if counts:  # the losses are sums
                mean_loss = mean_loss / counts[0] if counts[0] else math.nan
            skipped = round(self._layout.mesh.sdp * (everyone - stepped))
            return LocalUpdate(mean_loss, norms / stepped if stepped else math.nan, skipped)

        return PendingUpdate(receive)

    def summary(self, loss: float, norm: float, count: float | None = None) -> list[float]:
        """Return what this rank adds to the sums from which the outcome of a step follows."""
        mesh, first = self._layout.mesh, self._at.fsdp == 0 and self._at.tp == 0
        share = 1 / mesh.sdp if first else 0.0  # of the groups
        return [
            loss / mesh.world_size,
            *((share * norm, share) if math.isfinite(norm) else (0.0, 0.0)),
            share,
            *([count / mesh.world_size] if count is not None else []),
        ]

    def _norm_in_group(self) -> float:
        backend = self._backend
        counted = [p.grad for name, p in backend.parameters.items() if p.grad is not None and self._counts(name)]
        squared = squared_norm(counted, backend.device)
        group = backend.communicators.group
        if group is not None:
            backend.traffic.record("control", "all_reduce", squared.nbytes, dist.get_world_size(group))
            dist.all_reduce(squared, group=group)
        return math.sqrt(squared.item())

    @property
    def travelling(self) -> int | None:
        return self.outer.fragment_under_way

    def common_state(self) -> tuple[Mapping[str, torch.Tensor], Optimizer]:
        return {**self.untrained(), **self.outer.anchors}, self.outer.optimizer

    def groups_here(self) -> Iterator[GroupPart]:
        backend, at = self._backend, self._at
        swapped = self.outer.is_swapped
        buffers = self.buffers if swapped else self._buffers_here()
        trained = {name: backend.local_weight(name) for name in self.outer.anchors}
        yield GroupPart(
            at.sdp,
            f"{at.sdp}.{at.fsdp}.{at.tp}",
            self.outer.anchors if swapped else trained,
            {name: backend.parameters[name] for name in trained},
            backend.optimizer,
            self.outer.errors,
            self.outer.travelling[1],
            buffers,
        )

    def untrained(self) -> Mapping[str, torch.Tensor]:
        infos = self._layout.parameters
        return {name: p for name, p in self._backend.parameters.items() if not infos[name].trainable}

    def common_part(self) -> CommonPart:
        swapped = self.outer.is_swapped
        weights = {name: self._backend.local_weight(name) for name in self.outer.anchors}
        return CommonPart(
            weights if swapped else self.outer.anchors,
            self.outer.optimizer,
            self._buffers_here() if swapped else self.buffers,
            self.outer.travelling[0],
        )

    def nbytes(self) -> int:
        return self.outer.nbytes()

    def restart(self, travelling: int | None) -> None:
        self.outer.restart(travelling)

    def reset(self) -> None:
        self.outer.reset()
        for name, buffer in self._buffers_here().items():
            self.buffers[name].copy_(buffer)

    def start(self, fragment: int) -> None:
        """Start to average ``fragment``. Collective."""
        self.outer.start(fragment)

    def arrive(self) -> OuterFacts:
        """Apply the average that is under way. Collective."""
        fragment = self.outer.fragment_under_way
        names = [name for name in self._layout.buffers if self._fragments[name] == fragment]
        here = {name: buffer for name, buffer in self._buffers_here().items() if name in names}
        if names:
            agree_on_buffers(self._backend, names)
        facts = self.outer.arrive()
        for name, buffer in here.items():
            self.buffers[name].copy_(buffer)
        self._send_anchors({name for name, fragment in self._fragments.items() if fragment == facts.fragment})
        return facts

    def _send_anchors(self, names: Collection[str]) -> None:
        """Refresh the frozen copies of ``names``. The holders have new weights. Collective."""
        self._backend.refresh_from(self.outer.anchors, names)

    # -- the full model ----------------------------------------------------------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which weights and buffers of the module are the anchors."""
        if self.outer.is_swapped:
            yield
            return
        self._backend.shard_parameters()
        with self.outer.swapped():
            self._swap_buffers()
            try:
                yield
            finally:
                self._backend.shard_parameters()
                self._swap_buffers()

    @contextmanager
    def group_statistics(self) -> Iterator[None]:
        """A context in which running statistics are the means over this group's ranks. Collective
        in the group.
        """
        here = {n: b for n, b in self._buffers_here().items() if b.is_floating_point()}
        group = self._backend.communicators.group
        own = {name: buffer.clone() for name, buffer in here.items()}
        if group is not None and here:
            flat = torch.cat([buffer.reshape(-1).double() for buffer in here.values()])
            ranks = dist.get_world_size(group)
            self._backend.traffic.record("control", "all_reduce", flat.nbytes, ranks)
            dist.all_reduce(flat, group=group)
            means = (flat / ranks).split([buffer.numel() for buffer in here.values()])
            for buffer, mean in zip(here.values(), means, strict=True):
                buffer.copy_(mean.view(buffer.shape))
        try:
            yield
        finally:
            for name, buffer in here.items():
                buffer.copy_(own[name])

    @torch.no_grad()
    def _swap_buffers(self) -> None:
        for name, buffer in self._buffers_here().items():
            own = buffer.clone()
            buffer.copy_(self.buffers[name])
            self.buffers[name].copy_(own)
