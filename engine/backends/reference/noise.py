"""The gradients of each group in the reference, which otherwise only adds them up."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...backend import Backend
from ...sync.noise import MEAN, OWN, Moments, NoiseMeter, SecondMoments


class ReferenceNoise(NoiseMeter):
    """Measures the noise of units: the specification.

    In a step that is measured, the workers of a group run with views of the parameters. The
    gradients of the views are the group's own, and autograd adds them up in the parameters.
    """

    def __init__(self, backend: Backend):
        super().__init__(backend.layout, backend.device)
        self._backend, self._layout = backend, backend.layout
        self._forget_own()

    def _forget_own(self) -> None:
        # By group: the gradients of each parameter and micro-batch.
        self._own: list[dict[tuple[str, int], torch.Tensor]] = [{} for _ in self._layout.everyone]
        self._calls = 0  # of views_of, once for each worker and micro-batch

    def views_of(self, group: int) -> Mapping[str, torch.Tensor]:
        """Return the views with which the workers of ``group`` run. Empty if nothing is
        measured.
        """
        if not (self.is_due() and torch.is_grad_enabled()):
            return {}
        infos, views = self._layout.parameters, {}
        micro = self._calls // self._layout.mesh.data_ranks
        self._calls += 1
        for name, parameter in self._backend.parameters.items():
            if infos[name].trainable and group in infos[name].holders:
                views[name] = parameter.view_as(parameter)
                views[name].register_hook(lambda gradient, name=name: self._keep(group, (name, micro), gradient))
        return views

    def _keep(self, group: int, key: tuple[str, int], gradient: torch.Tensor) -> None:
        own = self._own[group]
        own[key] = own[key] + gradient if key in own else gradient.clone()

    def take(self) -> torch.Tensor:
        for group, gradients in enumerate(self._own):
            # The sum over F workers becomes their mean, whose square counts F times.
            workers = self._layout.mesh.size(group)
            of_step: dict[str, torch.Tensor] = {}
            for (name, _), gradient in gradients.items():
                of_step[name] = of_step[name] + gradient if name in of_step else gradient
                if self.compares_micro_batches:  # a loss was divided by their number
                    factor = float(workers * self.micro_batches**2)
                    self._add(OWN, name, gradient / workers, factor, group, several=False)
            for name, gradient in of_step.items():
                self._add(OWN, name, gradient / workers, float(workers), group, several=True)
        for name, parameter in self._backend.parameters.items():
            if parameter.grad is not None:
                self._add(MEAN, name, parameter.grad, 1.0, None)
        self.passes = 0  # sums stay sums here, so several passes do no harm
        return super().take()

    def _add(
        self,
        row: int,
        name: str,
        gradient: torch.Tensor,
        factor: float,
        group: int | None,
        *,
        several: bool | None = None,
    ) -> None:
        """Add a parameter's gradient to its unit, or that of its slices to theirs.

        Args:
            row: ``OWN`` or ``MEAN``.
            name: the parameter.
            gradient: its gradient.
            factor: what the squared norm is multiplied by.
            group: the group whose gradient it is. None: the mean of all.
            several: only units that have several holders, or one. None: all.
        """
        moments = SecondMoments(self._backend.basic_optimizer).of(self._backend.parameters[name])
        slices = [(unit.name, part) for unit in self._layout.units for part in unit.slices
                  if part.parameter == name and part.dim is not None]  # fmt: skip
        parts = [(self._layout.parameters[name].unit, gradient, moments)] if not slices else [
            (unit, part.of(gradient), moments and Moments(part.of(moments.squares), moments.epsilon))
            for unit, part in slices
        ]  # fmt: skip
        for unit, of_part, moments_of_part in parts:
            is_asked = several is None or several == self.measures(unit)
            if is_asked and (group is None or group in self.holders[unit]):
                self.add(row, unit, of_part, factor, moments_of_part)

    def drop(self) -> None:
        super().drop()
        self._forget_own()


def views_of(noise: NoiseMeter | None, group: int) -> Mapping[str, torch.Tensor]:
    """Return the views of parameters with which the workers of ``group`` run, if noise is
    measured.
    """
    return noise.views_of(group) if isinstance(noise, ReferenceNoise) else {}
