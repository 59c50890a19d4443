"""The gradients of each group in the reference, which otherwise only adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...placement.layout import Layout
from ...sync.noise import MEAN, OWN, Moments, NoiseMeter, SecondMoments
from .local_steps import range_of


class FullModel(Protocol):
    """What the measurement needs of the reference."""

    layout: Layout
    device: torch.device
    parameters: dict[str, nn.Parameter]

    @property
    def basic_optimizer(self) -> Optimizer: ...


class ReferenceNoise(NoiseMeter):
    """Measures the noise of units: the specification.

    In a step that is measured, the workers of a group run with views of the parameters. The
    gradients of the views are the group's own, and autograd adds them up in the parameters.
    """

    def __init__(self, backend: FullModel):
        super().__init__(backend.layout, backend.device)
        self._backend, self._layout = backend, backend.layout
        self._own: list[dict[str, torch.Tensor]] = [{} for _ in self._layout.everyone]

    def views_of(self, group: int) -> Mapping[str, torch.Tensor]:
        """Return the views with which the workers of ``group`` run. Empty if nothing is
        measured.
        """
        if not (self.is_due() and torch.is_grad_enabled()):
            return {}
        infos, views = self._layout.parameters, {}
        for name, parameter in self._backend.parameters.items():
            if infos[name].trainable and group in infos[name].holders:
                views[name] = parameter.view_as(parameter)
                views[name].register_hook(lambda gradient, name=name: self._keep(group, name, gradient))
        return views

    def _keep(self, group: int, name: str, gradient: torch.Tensor) -> None:
        own = self._own[group]
        own[name] = own[name] + gradient if name in own else gradient.clone()

    def take(self) -> torch.Tensor:
        mesh = self._layout.mesh
        for group, gradients in enumerate(self._own):
            for name, gradient in gradients.items():
                # The sum over F workers becomes their mean, whose square counts F times.
                self._add(OWN, name, gradient / mesh.size(group), float(mesh.size(group)), group)
        for name, parameter in self._backend.parameters.items():
            if parameter.grad is not None:
                self._add(MEAN, name, parameter.grad, 1.0, None)
        self.passes = 0  # sums stay sums here, so several passes do no harm
        return super().take()

    def _add(self, row: int, name: str, gradient: torch.Tensor, factor: float, group: int | None) -> None:
        """Add a parameter's gradient to its unit, or that of its slices to theirs."""
        moments = SecondMoments(self._backend.basic_optimizer).of(self._backend.parameters[name])
        slices = [(unit.name, part) for unit in self._layout.units for part in unit.slices
                  if part.parameter == name and part.dim is not None]  # fmt: skip
        if not slices:
            self._add_part(row, self._layout.parameters[name].unit, gradient, factor, moments, group)
        for unit, part in slices:
            of_part = moments and Moments(range_of(moments.squares, part), moments.epsilon)
            self._add_part(row, unit, range_of(gradient, part), factor, of_part, group)

    def _add_part(
        self, row: int, unit: str, gradient: torch.Tensor, factor: float, moments: Moments | None, group: int | None
    ) -> None:
        if self.measures(unit) and (group is None or group in self.holders[unit]):
            self.add(row, unit, gradient, factor, moments)

    def drop(self) -> None:
        super().drop()
        self._own = [{} for _ in self._layout.everyone]


def make_noise(self: FullModel) -> ReferenceNoise:
    """Make what measures the noise."""
    return ReferenceNoise(self)


def views_of(noise: NoiseMeter | None, group: int) -> Mapping[str, torch.Tensor]:
    """Return the views of parameters with which the workers of ``group`` run, if noise is
    measured.
    """
    return noise.views_of(group) if isinstance(noise, ReferenceNoise) else {}
