"""One message of an outer step of local steps, while it is under way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .compression import Exchange


@dataclass
class Average:
    """A bucket whose changes are under way.

    Attributes:
        names: the parameters.
        changes: their changes, if nothing is under way.
        exchange: what sends them. None: this group is the only holder.
        before: with overlap, the weights when the average started.
        keeps_weights: whether the weights become the anchors, without an outer step.
    """

    names: tuple[str, ...]
    changes: list[torch.Tensor]
    exchange: Exchange | None
    before: list[torch.Tensor] | None
    keeps_weights: bool

    def means(self) -> list[torch.Tensor]:
        """Wait for the average, and return the mean changes of the holders.

        The list is empty if this group is the only holder and nothing is late: its changes then are
        computed when they are needed.
        """
        if self.exchange is not None:
            self.changes, self.exchange = self.exchange.wait(), None
        return self.changes
