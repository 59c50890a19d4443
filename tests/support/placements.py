"""Units of given costs, and their placement."""

from __future__ import annotations

from typing import Any

from sdp.engine.config.schema import SDPSection
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.units import Unit


def units(costs: list[int], flops: list[int] | None = None) -> list[Unit]:
    """Make units that have these parameter counts and FLOPs."""
    return [Unit(index, f"layers.{index}", (), cost, flops[index] if flops else 0) for index, cost in enumerate(costs)]


def placed(these: list[Unit], **values: Any) -> Placement:
    """Place the units as a section ``sdp`` with ``values`` says."""
    return make_placement(SDPSection(**values), these)
