"""Variants of a model that studies and checks compare: capacity, granularity and masking."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """How a row trains its model.

    At capacity 1, the dense model, granularity and masking are "".
    """

    capacity: float
    granularity: str = ""
    masking: str = ""

    @property
    def name(self) -> str:
        return (
            " ".join(filter(None, [f"{self.capacity:g}", self.granularity, self.masking]))
            if self.granularity
            else "1 dense"
        )


def variants(capacities: Sequence[float], granularities: Sequence[str], maskings: Sequence[str]) -> list[Variant]:
    """Every row of a model, the dense one once."""
    below = [capacity for capacity in capacities if capacity < 1]
    dense = [Variant(1.0)] if 1.0 in capacities else []
    return [Variant(*key) for key in itertools.product(below, granularities, maskings)] + dense
