"""Units of given costs, and their placement."""

from typing import Any

from sdp.engine.config.schema import SDPSection
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.units import Unit


def units(costs: list[int], flops: list[int] | None = None) -> list[Unit]:
    return [Unit(index, f"layers.{index}", (), cost, flops[index] if flops else 0) for index, cost in enumerate(costs)]


def placed(these: list[Unit], **values: Any) -> Placement:
    return make_placement(SDPSection(**values), these)
