"""Local steps of the reference: every group has weights and optimizer state of its own.

The module has the anchors. So it is the full model, and the frozen copies of the groups are views
of it. A group's own weights replace the module's parameters while its workers run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from ...backend import Backend, CommonPart, GroupPart, LocalUpdate, PendingUpdate
from ...config.sync import SyncSection
from ...full_model.buffers import BufferMean, held_entries, persistent_buffers
from ...optim.clip import clip_, squared_norm
from ...optim.script_optimizers import stepped_by_engine
from ...sync.compression import rounded
from ...sync.outer import OuterFacts, make_outer_optimizer
from ...sync.rounds import fragments_of

Tensors = dict[str, torch.Tensor]


class GroupState:
    """The state of a virtual group: weights, gradients, optimizer, buffers, sending errors."""

    def __init__(self, weights: Mapping[str, torch.Tensor], buffers: Tensors):
        self.weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        self.state: dict[str, dict[str, Any]] = {}
        self.buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        self.errors = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.before: Tensors = {}  # the weights when the average that is under way started

    def gradients(self) -> list[torch.Tensor]:
        return [weight.grad for weight in self.weights.values() if weight.grad is not None]


class ReferenceLocalSteps:
    """The local steps of all groups of the reference."""

    def __init__(self, backend: Backend, sync: SyncSection, clipping: float):
        """``clipping`` is the largest norm of a group's gradient, or 0 for no clipping."""
        self._backend, self.sync, self._layout, self._clipping = backend, sync, backend.layout, clipping
        layout = backend.layout
        trained = {name: p for name, p in backend.parameters.items() if layout.parameters[name].trainable}
        self._anchors = trained
        self._fragments = fragments_of(layout, sync.fragments)
        buffers = persistent_buffers(backend.module, layout)
        self.groups = [
            GroupState({n: p for n, p in trained.items() if group in layout.parameters[n].holders}, buffers)
            for group in layout.everyone
        ]
        self._take_optimizer_state()
        self._shares = [self._share_of(group) for group in layout.everyone]
        self._single = self._held_once()
        self.optimizer = make_outer_optimizer(sync, list(trained.values()))
        self.under_way: tuple[int, Tensors] | None = None

    def _take_optimizer_state(self) -> None:
        """Give every group a copy of the optimizer's state, which was common to all."""
        state = self._backend.optimizer.state
        for group in self.groups:
            for name in group.weights:
                common = state.get(self._backend.parameters[name])
                if common:
                    group.state[name] = copy.deepcopy(common)

    def _share_of(self, group: int) -> dict[str, Any]:
        """Return this group's share of each parameter's mean, F_w / Σ F of the holders, or 0."""
        layout, workers = self._layout, self._layout.mesh.fsdp
        shares: dict[str, Any] = {}
        for name in self._anchors:
            info = layout.parameters[name]
            shares[name] = workers / layout.mesh.data_ranks_of(info.holders) if group in info.holders else 0.0
        for part, holders in layout.slices():
            if part.parameter in shares:
                share = workers / layout.mesh.data_ranks_of(holders) if group in holders else 0.0
                if not isinstance(shares[part.parameter], torch.Tensor):
                    ones = ones_along(self._anchors[part.parameter], part.dim)
                    shares[part.parameter] = ones * shares[part.parameter]
                part.of(shares[part.parameter]).fill_(share)
        return shares

    def _held_once(self) -> dict[str, Any]:
        """Return, by parameter, whether an element has one holder. Broadcasts."""
        layout = self._layout
        once: dict[str, Any] = {name: len(layout.parameters[name].holders) == 1 for name in self._anchors}
        for part, holders in layout.slices():
            if part.parameter in once:
                if not isinstance(once[part.parameter], torch.Tensor):
                    ones = ones_along(self._anchors[part.parameter], part.dim)
                    once[part.parameter] = ones.bool() & once[part.parameter]
                part.of(once[part.parameter]).fill_(len(holders) == 1)
        return once

    # -- steps -------------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for group in self.groups for gradient in group.gradients()]

    def scale_gradients(self, *, to_means: bool) -> None:
        """Make groups' gradients means over workers, or sums again. Missing ones become zeros."""
        for group in self.groups:
            workers = self._layout.mesh.fsdp
            for weight in group.weights.values():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad *= 1 / workers if to_means else workers

    def weigh_gradients(self, of_group: Sequence[float], unit: float) -> None:
        """Divide the gradients of each group, which are means over its workers, by its weights."""
        for group, total in zip(self.groups, of_group, strict=True):
            for weight in group.weights.values():
                if weight.grad is not None:
                    weight.grad *= self._layout.mesh.fsdp * unit / total if total else 0.0

    def zero_grad(self) -> None:
        for group in self.groups:
            for weight in group.weights.values():
                weight.grad = None

    def step(self, loss: torch.Tensor, scheduler: Any, count: float | None = None) -> PendingUpdate:
        limit, norms = self._clipping, []
        for group in self.groups:
            gradients = group.gradients()
            norm = math.sqrt(squared_norm(gradients, self._backend.device).item())
            if not math.isfinite(norm):
                continue
            norms.append(norm)
            if limit > 0:
                clip_(gradients, norm, limit)
            with self._as_parameters(group), stepped_by_engine(self._backend.optimizer):
                self._backend.optimizer.step()
        self._backend.zero_grad()
        if scheduler is not None:
            scheduler.step()
        mean = sum(norms) / len(norms) if norms else math.nan
        update = LocalUpdate(loss.item() / (count or 1.0), mean, len(self.groups) - len(norms))
        return PendingUpdate(lambda: update)

    @contextmanager
    def _as_parameters(self, group: GroupState) -> Iterator[None]:
        """A context in which the optimizer has the weights, gradients and state of ``group``."""
        optimizer, parameters = self._backend.optimizer, self._backend.parameters
        anchors = {name: parameters[name].data for name in group.weights}
        optimizer.state.clear()
        for name, weight in group.weights.items():
            parameters[name].data, parameters[name].grad = weight.data, weight.grad
            if name in group.state:
                optimizer.state[parameters[name]] = group.state[name]
        try:
            yield
        finally:
            for name in group.weights:
                group.state[name] = optimizer.state.get(parameters[name], {})
                parameters[name].data, parameters[name].grad = anchors[name], None

    # -- averages ----------------------------------------------------------------------------------

    @property
    def travelling(self) -> int | None:
        return self.under_way[0] if self.under_way is not None else None

    @torch.no_grad()
    def start(self, fragment: int) -> None:
        means: Tensors = {}
        for name, anchor in self._anchors.items():
            if self._fragments[name] != fragment:
                continue
            means[name] = torch.zeros_like(anchor)
            for group, shares in zip(self.groups, self._shares, strict=True):
                if name in group.weights:
                    change = (anchor - group.weights[name]) * shares[name]
                    if self.sync.compression != "none":
                        sent = rounded(change + group.errors[name], group.errors[name], self.sync.compression)
                        change = torch.where(torch.as_tensor(self._single[name], device=anchor.device), change, sent)
                    means[name] += change
                    group.before[name] = group.weights[name].detach().clone()
        self.under_way = fragment, means

    @torch.no_grad()
    def arrive(self) -> OuterFacts:
        assert self.under_way is not None
        (fragment, means), self.under_way = self.under_way, None
        facts = self._measure(fragment, means)
        for name, mean in means.items():
            self._anchors[name].grad = mean
        self.optimizer.step()
        for name in means:
            anchor = self._anchors[name]
            anchor.grad = None
            once = torch.as_tensor(self._single[name] if self.sync.single_holder == "skip" else False)
            for group, shares in zip(self.groups, self._shares, strict=True):
                if name in group.weights:
                    alone = once.to(anchor.device) & (torch.as_tensor(shares[name], device=anchor.device) > 0)
                    anchor.copy_(torch.where(alone, group.weights[name], anchor))
            for group in self.groups:
                if name in group.weights:
                    weight, before = group.weights[name], group.before.pop(name)
                    moved = anchor + (weight - before) if self.sync.overlap else anchor
                    weight.copy_(torch.where(once.to(anchor.device), weight, moved))
        self._average_buffers(fragment)
        return facts

    def _measure(self, fragment: int, means: Mapping[str, torch.Tensor]) -> OuterFacts:
        device = self._backend.device
        moved, anchors = [], []
        for group, shares in zip(self.groups, self._shares, strict=True):
            for name in means:
                if name in group.weights:
                    held = torch.as_tensor(shares[name], device=device) > 0
                    moved.append((self._anchors[name] - group.before[name]) * held)
                    anchors.append(self._anchors[name] * held)
        drift, anchor, gradient = (
            math.sqrt(squared_norm(tensors, device).item()) for tensors in (moved, anchors, list(means.values()))
        )
        return OuterFacts(fragment, drift / anchor if anchor else 0.0, gradient)

    # -- buffers -----------------------------------------------------------------------------------

    def _average_buffers(self, fragment: int) -> None:
        """Make a fragment's buffers, here and in all groups, the means over holders' workers."""
        infos = {name: info for name, info in self._layout.buffers.items() if self._fragments[name] == fragment}
        if not infos:
            return
        here = {n: b for n, b in persistent_buffers(self._backend.module, self._layout).items() if n in infos}
        device = self._backend.device
        mean = BufferMean(infos, device)
        for index, group in enumerate(self.groups):
            held = held_entries(self._layout, index, device)
            for _ in range(self._layout.mesh.fsdp):
                mean.add({name: group.buffers[name] for name in infos}, held)
        mean.give(here)
        for name, info in infos.items():
            if not info.dtype.is_floating_point:
                here[name].copy_(self.groups[info.holders[0]].buffers[name])
            for group in self.groups:
                group.buffers[name].copy_(here[name])

    # -- state -------------------------------------------------------------------------------------

    def groups_here(self) -> Iterator[GroupPart]:
        for index, group in enumerate(self.groups):
            weights = {name: weight.detach() for name, weight in group.weights.items()}
            with self._as_parameters(group):
                yield GroupPart(
                    index,
                    f"{index}",
                    weights,
                    {name: self._backend.parameters[name] for name in weights},
                    self._backend.optimizer,
                    group.errors if self.sync.compression == "int8" else {},
                    group.before,
                    group.buffers,
                )

    def untrained(self) -> Mapping[str, torch.Tensor]:
        return {name: p for name, p in self._backend.parameters.items() if name not in self._anchors}

    def common_part(self) -> CommonPart:
        buffers = persistent_buffers(self._backend.module, self._layout)
        means = self.under_way[1] if self.under_way is not None else {}
        return CommonPart(self._anchors, self.optimizer, buffers, means)

    def nbytes(self) -> int:
        """Anchors are the module's parameters. They and groups' own weights do not count here."""
        state = [value for of in self.optimizer.state.values() for value in of.values()]
        return sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.dim())

    def restart(self, travelling: int | None) -> None:
        self.under_way = None
        for group in self.groups:
            group.before = {}
        if travelling is not None:
            names = [name for name in self._anchors if self._fragments[name] == travelling]
            self.under_way = travelling, {name: torch.zeros_like(self._anchors[name]) for name in names}
            for group in self.groups:
                group.before = {n: torch.zeros_like(self._anchors[n]) for n in names if n in group.weights}

    @torch.no_grad()
    def reset(self) -> None:
        self.restart(None)
        buffers = persistent_buffers(self._backend.module, self._layout)
        for group in self.groups:
            for name, weight in group.weights.items():
                weight.copy_(self._anchors[name])
            for name, buffer in group.buffers.items():
                buffer.copy_(buffers[name])
            for error in group.errors.values():
                error.zero_()

    def common_state(self) -> tuple[Mapping[str, torch.Tensor], Optimizer]:
        return self._backend.parameters, self.optimizer

    def anchored(self) -> nullcontext[None]:
        """A no-op: the module has the anchors."""
        return nullcontext()


def ones_along(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return ones that broadcast to ``tensor``, of its size along ``dim``."""
    shape = [size if axis == dim else 1 for axis, size in enumerate(tensor.shape)]
    return torch.ones(shape, device=tensor.device)
