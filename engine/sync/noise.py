"""Measures the gradient noise of every unit from its holders' own gradients (McCandlish et al.,
arXiv 1812.06162).

Holders of a unit compute gradients on different data before they average them. So the spread of
their gradients around the mean shows the noise, without another backward pass.

Let group w have F_w data ranks and the gradient g_w, the mean over its ranks. Let R = Σ F_w over
the k holders, and ḡ = Σ F_w·g_w / R. Let T be the trace of the covariance of one rank's gradient.
Then E Σ F_w‖g_w‖² = R‖G‖² + k·T and E‖ḡ‖² = ‖G‖² + T / R. This gives the unbiased estimates

- T = (Σ F_w‖g_w‖² − R‖ḡ‖²) / (k − 1),
- ‖G‖² = ‖ḡ‖² − T / R.

For groups of equal size F, T / F = k (mean‖g_w‖² − ‖ḡ‖²) / (k − 1), which is the paper's formula
for the noise of a group's gradient.

A unit with one holder has no others to compare with. If a step accumulates M ≥ 2 micro-batches,
these take the place of holders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic
from ..placement.layout import Layout
from ..placement.units import SHARED

OWN, MEAN = 0, 1  # rows of the sums; the same of preconditioned gradients are two rows below
ROWS = 4
FLOAT64 = 8
CHUNK = 2**22  # elements that are in float64 at a time


class Moments(NamedTuple):
    """An optimizer's second moments of some elements, and its epsilon."""

    squares: torch.Tensor
    epsilon: float


class UnitNoise(NamedTuple):
    """The noise of one unit's gradient in one step.

    Attributes:
        trace: tr Σ, the trace of the covariance of one sample's gradient.
        squared_norm: ‖G‖², the squared norm of the true gradient. The estimate may be negative.
    """

    trace: float
    squared_norm: float


class NoiseMeter:
    """Adds up a rank's part of Σ F_w‖g_w‖² and ‖ḡ‖² by unit, in the steps that are measured.

    Args:
        layout: the layout of the full model.
        device: where the sums are needed.

    Attributes:
        is_due: returns whether the present step is measured.
        passes: the backward passes at the boundary since the last :meth:`take`.
        micro_batches: the number M of micro-batches that a step accumulates.
    """

    def __init__(self, layout: Layout, device: torch.device):
        mesh = layout.mesh
        self._device = device
        self.is_due: Callable[[], bool] = lambda: False
        self.passes, self.micro_batches = 0, 1
        self.holders = {
            unit.name: holders for unit, holders in zip(layout.units, layout.placement.holders, strict=True)
        }
        self.holders[SHARED] = layout.everyone
        self.units = list(self.holders)
        self.ranks = {unit: mesh.data_ranks_of(holders) for unit, holders in self.holders.items()}
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._values: list[tuple[int, int, torch.Tensor]] = []

    def measures(self, unit: str) -> bool:
        """Return whether ``unit`` has several holders."""
        return len(self.holders[unit]) > 1

    @property
    def compares_micro_batches(self) -> bool:
        """Whether units with one holder are measured by their micro-batches."""
        return self.micro_batches > 1

    def add(self, row: int, unit: str, gradient: torch.Tensor, factor: float, moments: Moments | None) -> None:
        """Add ``factor`` times the squared norm of a local gradient to a row of the sums.

        Args:
            row: ``OWN`` or ``MEAN``.
            unit: the name of the unit, or "shared".
            gradient: some elements of its gradient.
            factor: what the squared norm is multiplied by.
            moments: the second moments of these elements. None if the optimizer has none.
        """
        local = local_tensor(gradient).detach().reshape(-1)
        squares = local_tensor(moments.squares).detach().reshape(-1) if moments is not None else None
        for start in range(0, local.numel(), CHUNK):
            part = local[start : start + CHUNK].double()
            self._values.append((row, self._index[unit], part.square().sum() * factor))
            scaled = torch.full((), torch.nan, dtype=torch.float64)
            if squares is not None and moments is not None:
                roots = squares[start : start + CHUNK].double().sqrt() + moments.epsilon
                scaled = (part / roots.to(part.device)).square().sum() * factor
            self._values.append((row + 2, self._index[unit], scaled))

    def take(self) -> torch.Tensor:
        """Return the sums since the last call, shape (4, units), float64, and start again.

        They are NaN after several backward passes at the boundary. The later passes then averaged
        sums of means and own gradients.
        """
        sums = torch.zeros(ROWS, len(self.units), dtype=torch.float64, device=self._device)
        for row, unit, value in self._values:
            sums[row, unit] += value.to(self._device)
        if self.passes > 1:
            sums.fill_(torch.nan)
        self.drop()
        return sums

    def forget(self, units: Collection[str]) -> None:
        """Forget the sums of some units."""
        indices = {self._index[unit] for unit in units}
        self._values = [value for value in self._values if value[1] not in indices]

    def drop(self) -> None:
        """Forget the sums of a step that is not measured to its end."""
        self._values, self.passes = [], 0

    def estimate(self, sums: torch.Tensor, samples: float) -> dict[str, tuple[UnitNoise, UnitNoise | None]]:
        """Return the noise of every unit that was measured, plain and preconditioned.

        Args:
            sums: the sums over all ranks, as :meth:`take` returns them.
            samples: the samples of one rank in a step.
        """
        found: dict[str, tuple[UnitNoise, UnitNoise | None]] = {}
        for unit, (own, mean, scaled_own, scaled_mean) in zip(self.units, sums.T.tolist(), strict=True):
            # The number of holders, or of the only holder's micro-batches, and the ranks of all.
            many = 1 if self.measures(unit) else self.micro_batches
            count, ranks = max(len(self.holders[unit]), many), self.ranks[unit] * many
            if own > 0 and count > 1:  # it is NaN if it could not be measured
                plain = estimate(own, mean, count, ranks, samples / many)
                is_known = scaled_own == scaled_own
                scaled = estimate(scaled_own, scaled_mean, count, ranks, samples / many) if is_known else None
                found[unit] = plain, scaled
        return found

    def planned_traffic(self, world_size: int) -> Traffic:
        """Return what a rank sends in a measured step in addition to its other messages."""
        traffic = Traffic()
        traffic.record("control", "all_reduce", ROWS * len(self.units) * FLOAT64, world_size)
        return traffic


def estimate(own: float, mean: float, holders: int, ranks: int, samples: float) -> UnitNoise:
    """Return the noise of a unit.

    Args:
        own: Σ F_w‖g_w‖² over the holders, or over micro-batches.
        mean: ‖ḡ‖².
        holders: the number k of these, at least 2.
        ranks: the number R of their data ranks.
        samples: the samples of one rank in each of them.
    """
    of_rank = (own - ranks * mean) / (holders - 1)
    return UnitNoise(of_rank * samples, mean - of_rank / ranks)


class SecondMoments:
    """Finds the second moments in the state of an optimizer.

    They are as the optimizer keeps them. Its correction of their bias is one factor for all units.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._epsilon = {id(p): float(group.get("eps", 1e-8)) for group in groups for p in group["params"]}

    def of(self, stepped: torch.Tensor | None, epsilon: float | None = None) -> Moments | None:
        """Return the moments of a tensor that the optimizer steps on.

        None if it has none, as before the first step. ``epsilon`` is by default that of the
        tensor's parameter group.
        """
        state = self._optimizer.state.get(stepped, {}) if stepped is not None else {}
        squares = state.get("exp_avg_sq")
        if not isinstance(squares, torch.Tensor):
            return None
        return Moments(squares, self._epsilon.get(id(stepped), 1e-8) if epsilon is None else epsilon)
