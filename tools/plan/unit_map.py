"""The map of units and groups as SVG: units across, in the model's order, groups downwards; above, how many groups hold each unit."""

from __future__ import annotations

from html import escape

from ...engine.placement.placement import Placement

_MOST_GROUPS, _MOST_UNITS = 128, 512  # drawn
_WIDTH, _LEFT, _RIGHT = 840, 76, 52  # of the cells, and of what stands beside them
_BARS, _GAP, _BELOW = 40, 8, 22  # heights


def map_of(placement: Placement) -> str:
    """HTML: the drawing and its legend. Every unit's column names it and its holders when it is pointed at."""
    units, groups = min(len(placement.units), _MOST_UNITS), min(placement.groups, _MOST_GROUPS)
    wide = min(36.0, _WIDTH / units)
    high = 18 if groups <= 16 else 10 if groups <= 48 else 5
    top = _BARS + _GAP
    gap = 1.0 if wide >= 4 else 0.0  # between cells
    parts = [
        f'<text x="{_LEFT - 8}" y="{_BARS}" text-anchor="end">holders k</text>',
        *(_group(placement, group, units, wide, high, top, gap) for group in range(groups)),
        *(_unit(placement, unit, wide, top + groups * high, gap) for unit in range(units)),
        *(_number(unit, _LEFT + (unit + 0.5) * wide, top + groups * high + 15) for unit in _ticks(units, wide)),
    ]
    size = f"{_LEFT + units * wide + _RIGHT:.0f} {top + groups * high + _BELOW}"
    drawing = f'<svg viewBox="0 0 {size}" style="max-width:{size.split()[0]}px" role="img">{"".join(parts)}</svg>'
    left_out = "" if (groups, units) == (placement.groups, len(placement.units)) else (
        f" Drawn are the first {units} of {len(placement.units)} units and {groups} of {placement.groups} groups.")  # fmt: skip
    return (
        f'<div class="wide">{drawing}</div><p class="key"><span><b class="held"></b>held by the group</span>'
        f'<span><b class="absent"></b>not held</span><span><b class="count"></b>k: how many of {placement.groups} groups hold the unit'
        f"</span></p><p>Across: the units in the model’s order, from {escape(placement.units[0])} to {escape(placement.units[-1])}. "
        f"Down: the groups, with the part of the units’ parameters that each holds.{left_out}</p>"
    )


def _group(placement: Placement, group: int, units: int, wide: float, high: int, top: int, gap: float) -> str:
    """A row: its background and, of neighbouring units that are held, one rectangle where cells have no gaps."""
    y = top + group * high
    runs: list[list[int]] = []
    for unit in range(units):
        if not placement.holds(group, unit):
            continue
        if runs and runs[-1][1] == unit and not gap:
            runs[-1][1] = unit + 1
        else:
            runs.append([unit, unit + 1])
    held = "".join(
        f"M{_LEFT + a * wide:.2f} {y}h{(b - a) * wide - gap:.2f}v{high - 1}h{gap - (b - a) * wide:.2f}z"
        for a, b in runs
    )
    row = f'<rect class="absent" x="{_LEFT}" y="{y}" width="{units * wide - gap:.2f}" height="{high - 1}"/><path class="held" d="{held}"/>'
    if high < 10 and group % 4:
        return row
    middle = y + high / 2 + 3
    share = f'<text x="{_LEFT + units * wide + 6:.1f}" y="{middle}">{placement.held_fraction(group):.0%}</text>'
    return f'{row}<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">group {group}</text>{share}'


def _unit(placement: Placement, unit: int, wide: float, bottom: int, gap: float) -> str:
    """A column: the bar of its holders, and what is shown where it is pointed at."""
    holders = placement.holders[unit]
    x, tall = _LEFT + unit * wide, _BARS * len(holders) / placement.groups
    title = f"{placement.units[unit]}: k = {len(holders)}, held by {', '.join(map(str, holders))}"
    return (
        f'<rect class="count" x="{x:.2f}" y="{_BARS - tall:.1f}" width="{wide - gap:.2f}" height="{tall:.1f}"/>'
        f'<rect class="unit" x="{x:.2f}" y="0" width="{wide:.2f}" height="{bottom}"><title>{escape(title)}</title></rect>'
    )


def _number(unit: int, x: float, y: int) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{unit}</text>'


def _ticks(units: int, wide: float) -> range:
    """Units whose number is written: so many that numbers keep apart."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * wide >= 26 or step == 128)
    return range(0, units, step)
