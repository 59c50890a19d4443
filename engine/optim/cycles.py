"""DeepSpeed's OneCycle and LRRangeTest, which vary the rate between bounds (arXiv 1803.09820)."""

from __future__ import annotations

import logging
import math

from torch.optim import Optimizer

from ..config.named_params import LRRangeTestParams, OneCycleParams
from .schedule import Schedule

log = logging.getLogger(__name__)

_BETA2 = 0.99  # DeepSpeed sets it together with the momentum


class LRRangeTest(Schedule):
    """Raises the rate steadily, or in stairs, to find out from which rate on a model diverges."""

    def __init__(self, optimizer: Optimizer, params: LRRangeTestParams) -> None:
        super().__init__(optimizer)
        self._params = params
        self._minimum = self._per_group(params.lr_range_test_min_lr, "lr_range_test_min_lr")
        self._set_rates()

    def rates_at(self, iteration: int) -> list[float]:
        intervals = float(iteration + 1) / self._params.lr_range_test_step_size
        if self._params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        increase = 1 + self._params.lr_range_test_step_rate * intervals
        return [rate * increase for rate in self._minimum]


class OneCycle(Schedule):
    """Raises the rate and lowers it again, while the momentum does the opposite. Then both decay.

    As in DeepSpeed, the momentum is the first of the optimizer's ``betas``, and the second becomes
    0.99. An optimizer without ``betas`` keeps its momentum.
    """

    def __init__(self, optimizer: Optimizer, params: OneCycleParams) -> None:
        super().__init__(optimizer)
        self._params = params
        self._first = float(params.cycle_first_step_size)
        second = params.cycle_second_step_size
        self._second = self._first if second is None else float(second)
        self._total = self._first + self._second
        second_stairs = params.cycle_second_stair_count
        self._stairs = (
            params.cycle_first_stair_count,
            params.cycle_first_stair_count if second_stairs is None else second_stairs,
        )
        self._minimum = self._per_group(params.cycle_min_lr, "cycle_min_lr")
        self._maximum = self._per_group(params.cycle_max_lr, "cycle_max_lr")
        self._cycles_momentum = params.cycle_momentum and "betas" in optimizer.defaults
        if params.cycle_momentum and not self._cycles_momentum:
            log.warning(
                "scheduler.params.cycle_momentum has no effect: %s has no betas; set it to false",
                type(optimizer).__name__,
            )
        self._set_rates()

    def rates_at(self, iteration: int) -> list[float]:
        if iteration < self._total:
            height = self._height(iteration)
            return [low + (high - low) * height for low, high in zip(self._minimum, self._maximum, strict=True)]
        factor = 1 + self._params.decay_lr_rate * self._decay_intervals(iteration)
        return [rate / factor for rate in self._minimum]

    def momentum_at(self, iteration: int) -> float:
        """Return the momentum after ``step()`` number ``iteration``."""
        params = self._params
        if iteration < 0:
            return params.cycle_min_mom  # DeepSpeed's first optimizer step has the lower bound
        if iteration < self._total:
            return params.cycle_max_mom - (params.cycle_max_mom - params.cycle_min_mom) * self._height(iteration)
        return params.cycle_max_mom * (1 + params.decay_mom_rate * self._decay_intervals(iteration))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the ``betas`` of each parameter group, or None if the momentum stays."""
        if not self._cycles_momentum:
            return None
        return [(self.momentum_at(self.last_batch_iteration), _BETA2)] * len(self.base_lrs)

    def _height(self, iteration: int) -> float:
        """Return how far the rate is from its minimum (0) to its maximum (1)."""
        batch = iteration + 1
        cycle = math.floor(1 + batch / self._total)
        x = 1.0 + batch / self._total - cycle
        ratio = self._first / self._total
        rises = x <= ratio
        stairs = self._stairs[0 if rises else 1]
        if stairs == 0:
            return x / ratio if rises else (x - 1) / (ratio - 1)
        # Count stairs in whole steps. A height that is rounded below a stair would miss it.
        within = batch % self._total
        position = (
            within * stairs / self._first if within <= self._first else (self._total - within) * stairs / self._second
        )
        return math.floor(position) / stairs

    def _decay_intervals(self, iteration: int) -> float:
        size = self._params.decay_step_size
        return (iteration - self._total + 1) / size if size else 0.0

    def _set_rates(self) -> None:
        super()._set_rates()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas
