"""The weights of losses: g_u = Σ n·∂ℓ / Σ n over the micro-batches of a unit's holders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .call import checked_weights, count_targets


def count_labels(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Count the labels of a batch, a float64 scalar.

    Args:
        module: The model.
        args: The arguments of its ``forward``, or the batch alone.
        kwargs: Further arguments by name.
    """
    batch: Any = args[0] if len(args) == 1 and not kwargs else args
    if kwargs:
        batch = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    return count_targets(module, batch).double()


class LossWeights:
    """The weights of the micro-batches of the present step, and their losses.

    Attributes:
        unit: A power of two near the mean weight. Gradients are computed in this unit, so that
            they do not overflow in half precision. No result depends on it.
        all: Σ n over all ranks that average their gradients, from the end of the last backward pass
            of a step.
    """

    def __init__(self) -> None:
        self.unit, self.all, self._next_unit = 1.0, 0.0, 1.0
        self._weights: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._weights)

    def checked(self, weight: Any, device: torch.device) -> torch.Tensor:
        """Return the script's ``weight`` as a float64 scalar.

        Raises:
            ConfigError: It is not a number from 0.
        """
        if isinstance(weight, torch.Tensor) and weight.numel() == 1:
            return weight.detach().to(device).double().reshape(())
        numbers = checked_weights(weight if isinstance(weight, list | tuple) else [weight])
        if len(numbers) != 1:
            raise ConfigError(f"backward: weight has {len(numbers)} numbers; give the one of this rank's loss")
        return torch.tensor(numbers[0], dtype=torch.float64, device=device)

    def begin_after(self, losses: Sequence[torch.Tensor], accumulation: int) -> None:
        """Let earlier micro-batches of this step weigh 1.

        ``losses``: their mean losses. Gradients were computed in the unit ``accumulation``.
        """
        for loss in losses:
            self.add(loss.new_ones((), dtype=torch.float64), loss)
        self.unit = float(accumulation)

    def add(self, weight: torch.Tensor, loss: torch.Tensor) -> None:
        """Add a micro-batch: its weight and its mean loss, scalars."""
        self._weights.append(weight)
        # The mean over no labels is NaN.
        self._losses.append(torch.where(weight > 0, loss.detach().double() * weight, 0.0))

    def total(self) -> torch.Tensor:
        """Return Σ n over the micro-batches, a float64 scalar."""
        return torch.stack(self._weights).sum()

    def weighted_loss(self) -> torch.Tensor:
        """Return Σ n·ℓ over the micro-batches, a float64 scalar."""
        return torch.stack(self._losses).sum()

    def note_all(self, total: float, ranks: int) -> None:
        """Note Σ n over the ``ranks`` that average."""
        self.all = total
        if total:
            self._next_unit = 2.0 ** round(math.log2(total / (ranks * len(self._weights))))

    def clear(self) -> None:
        """Forget the micro-batches. The next step computes in the unit of this one's weights."""
        self._weights, self._losses = [], []
        self.unit = self._next_unit
