"""Units of given costs, and their placement."""

from typing import Any

import numpy as np
from sdp.engine.config.schema import SDPSection
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.units import Unit


def units(costs: list[int], flops: list[int] | None = None) -> list[Unit]:
    return [Unit(index, f"layers.{index}", (), cost, flops[index] if flops else 0) for index, cost in enumerate(costs)]


def placed(these: list[Unit], **values: Any) -> Placement:
    return make_placement(SDPSection(**values), these)


def matrix_of(placement: Placement) -> np.ndarray:
    """0/1 matrix, shape (groups, units): 1 if the group holds the unit."""
    return np.array([[g in held for held in placement.holders] for g in range(placement.groups)], dtype=int)
