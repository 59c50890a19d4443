"""The weights of losses: g_u = Σ n·∂ℓ / Σ n over the micro-batches of a unit's holders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .call import checked_weights, count_targets, split_rows


def count_labels(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int) -> torch.Tensor:
    """Count the labels of a batch by data rank, float64 (ranks,).

    Args:
        module: The model.
        args: The arguments of its ``forward``, or the batch alone.
        kwargs: Further arguments by name.
        ranks: How many data ranks of this process share the rows.
    """
    batch: Any = args[0] if len(args) == 1 and not kwargs else args
    if kwargs:
        batch = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    parts = split_rows(batch, ranks) if ranks > 1 else [batch]
    return torch.stack([count_targets(module, part).double() for part in parts])


class LossWeights:
    """The weights of the micro-batches of the present step, and their losses.

    Args:
        ranks: The number of data ranks in this process.

    Attributes:
        unit: A power of two near the mean weight. Gradients are computed in this unit, so that
            they do not overflow in half precision. No result depends on it.
        all: Σ n over all ranks that average their gradients, from the end of the last backward pass
            of a step.
    """

    def __init__(self, ranks: int):
        self._ranks = ranks
        self.unit, self.all, self._next_unit = 1.0, 0.0, 1.0
        self._weights: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._weights)

    def checked(self, weight: Any, device: torch.device) -> torch.Tensor:
        """Return the script's ``weight`` as a float64 tensor (ranks,).

        Raises:
            ConfigError: It is not a number from 0, or not one for each data rank of this process.
        """
        if isinstance(weight, torch.Tensor) and weight.numel() == self._ranks:
            return weight.detach().to(device).double().reshape(self._ranks)
        numbers = checked_weights(weight if isinstance(weight, list | tuple) else [weight])
        if len(numbers) != self._ranks:
            raise ConfigError(
                f"backward: weight has {len(numbers)} numbers for {self._ranks} data rank(s) in this process; give one "
                "for each"
            )
        return torch.tensor(numbers, dtype=torch.float64, device=device)

    def begin_after(self, losses: Sequence[torch.Tensor], accumulation: int) -> None:
        """Let earlier micro-batches of this step weigh 1.

        ``losses``: their mean losses. Gradients were computed in the unit ``accumulation``.
        """
        for loss in losses:
            self.add(loss.new_ones(self._ranks, dtype=torch.float64), loss.expand(self._ranks))
        self.unit = float(accumulation)

    def add(self, weights: torch.Tensor, losses: torch.Tensor) -> None:
        """Add a micro-batch: its weights and its mean losses, both (ranks,)."""
        self._weights.append(weights)
        # The mean over no labels is NaN.
        self._losses.append(torch.where(weights > 0, losses.detach().double() * weights, 0.0))

    def totals(self) -> torch.Tensor:
        """Return Σ n over the micro-batches, float64 (ranks,)."""
        return torch.stack(self._weights).sum(0)

    def weighted_loss(self) -> torch.Tensor:
        """Return Σ n·ℓ over the micro-batches and data ranks of this process, a float64 scalar."""
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
