"""The base of all learning-rate schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigError, quote


class Schedule(ABC):
    """Sets the rates of the parameter groups of ``optimizer``, on construction and in ``step()``.

    It has the methods of DeepSpeed's schedulers. It reads the base rates from the optimizer on
    construction, so build it before a checkpoint is loaded. Its own state is one integer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1

    @abstractmethod
    def rates_at(self, iteration: int) -> list[float]:
        """Return the rate of each parameter group after ``step()`` number ``iteration``.

        The first ``step()`` has number 0. -1 means before the first ``step()``.
        """

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at the current iteration."""
        return self.rates_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to ``last_batch_iteration``, and set its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set_rates()

    def state_dict(self) -> dict[str, int]:
        """Return all that a restart needs in addition to the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` and set its rates.

        Raises:
            CheckpointError: ``state`` does not have a valid ``last_batch_iteration``.
        """
        iteration = state.get("last_batch_iteration")
        if type(iteration) is not int or not -1 <= iteration < 2**63:
            raise CheckpointError(f"scheduler state: last_batch_iteration {quote(iteration)} is not an integer from -1")
        self.last_batch_iteration = iteration
        self._set_rates()

    def _set_rates(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # compiled or captured steps read this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, rates: float | list[float], key: str) -> list[float]:
        """Return a rate for each parameter group."""
        if not isinstance(rates, list):
            return [rates] * len(self.base_lrs)
        if len(rates) != len(self.base_lrs):
            raise ConfigError(
                f"scheduler.params.{key}: {len(rates)} rates for {len(self.base_lrs)} parameter groups; "
                "give one number, or one for each group"
            )
        return list(rates)
