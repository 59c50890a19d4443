"""A map of units and groups as SVG.

The units run from left to right in the model's order, the groups from top to bottom. A bar above
each unit shows how many groups hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from ...engine.placement.placement import Placement
from .templates import render

_MOST_GROUPS, _MOST_UNITS = 128, 512  # that are drawn
_WIDTH, _LEFT, _RIGHT = 840, 76, 52  # of the cells, and of the labels on both sides
_BARS, _GAP, _BELOW = 40, 8, 22  # heights: of the bars, below them, and of the unit numbers


def draw_map(placement: Placement) -> Markup:
    """Draw the map with its legend. Pointing at a unit's column shows its name and its holders."""
    return _Map(placement).draw()


@dataclass(frozen=True)
class _Map:
    """The geometry of the map of ``placement``, in pixels."""

    placement: Placement

    @property
    def units(self) -> int:
        return min(len(self.placement.units), _MOST_UNITS)

    @property
    def groups(self) -> int:
        return min(self.placement.groups, _MOST_GROUPS)

    @property
    def cell_width(self) -> float:
        return min(36.0, _WIDTH / self.units)

    @property
    def cell_height(self) -> int:
        return 18 if self.groups <= 16 else 10 if self.groups <= 48 else 5

    @property
    def gap(self) -> float:
        """The space between cells of one row."""
        return 1.0 if self.cell_width >= 4 else 0.0

    @property
    def bottom(self) -> int:
        return _BARS + _GAP + self.groups * self.cell_height

    def draw(self) -> Markup:
        placement = self.placement
        complete = (self.groups, self.units) == (placement.groups, len(placement.units))
        return render(
            "unit_map.html.jinja",
            width=f"{_LEFT + self.units * self.cell_width + _RIGHT:.0f}",
            height=self.bottom + _BELOW,
            left=_LEFT,
            bars=_BARS,
            bottom=self.bottom,
            label_x=_LEFT - 8,
            share_x=f"{_LEFT + self.units * self.cell_width + 6:.1f}",
            rows=[self._row(group) for group in range(self.groups)],
            columns=[self._column(unit) for unit in range(self.units)],
            ticks=[{"unit": unit, "x": f"{self._x(unit + 0.5):.1f}"} for unit in self._numbered()],
            groups=placement.groups,
            first=placement.units[0],
            last=placement.units[-1],
            left_out=""
            if complete
            else f" Drawn are the first {self.units} of {len(placement.units)} units and {self.groups} of "
            f"{placement.groups} groups.",
        )

    def _x(self, unit: float) -> float:
        return _LEFT + unit * self.cell_width

    def _row(self, group: int) -> dict[str, object]:
        """The cells of one group. Only every fourth low row has labels."""
        y = _BARS + _GAP + group * self.cell_height
        labelled = self.cell_height >= 10 or group % 4 == 0
        return {
            "y": y,
            "width": f"{self.units * self.cell_width - self.gap:.2f}",
            "height": self.cell_height - 1,
            "middle": y + self.cell_height / 2 + 3,
            "held": "".join(self._rectangle(y, *run) for run in self._runs(group)),
            "label": f"group {group}" if labelled else "",
            "share": f"{self.placement.held_fraction(group):.0%}" if labelled else "",
        }

    def _runs(self, group: int) -> list[tuple[int, int]]:
        """The units that the group holds, as ranges. Without gaps, neighbours share a range."""
        runs: list[tuple[int, int]] = []
        for unit in range(self.units):
            if not self.placement.holds(group, unit):
                continue
            if runs and runs[-1][1] == unit and not self.gap:
                runs[-1] = runs[-1][0], unit + 1
            else:
                runs.append((unit, unit + 1))
        return runs

    def _rectangle(self, y: int, first: int, end: int) -> str:
        width = (end - first) * self.cell_width
        return f"M{self._x(first):.2f} {y}h{width - self.gap:.2f}v{self.cell_height - 1}h{self.gap - width:.2f}z"

    def _column(self, unit: int) -> dict[str, object]:
        """The bar of a unit's holders, and the text that pointing at the column shows."""
        holders = self.placement.holders[unit]
        tall = _BARS * len(holders) / self.placement.groups
        return {
            "x": f"{self._x(unit):.2f}",
            "top": f"{_BARS - tall:.1f}",
            "tall": f"{tall:.1f}",
            "width": f"{self.cell_width:.2f}",
            "bar_width": f"{self.cell_width - self.gap:.2f}",
            "title": f"{self.placement.units[unit]}: k = {len(holders)}, held by {', '.join(map(str, holders))}",
        }

    def _numbered(self) -> range:
        """The units whose number is written: as many as leave 26 pixels between numbers."""
        steps = (1, 2, 4, 8, 16, 32, 64, 128)
        return range(0, self.units, next((step for step in steps if step * self.cell_width >= 26), 128))
