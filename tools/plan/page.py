"""Writes a plan as one HTML page: bars of memory, a map of units and groups, and the plan's text.

The page loads no other files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...engine.accounting.quantities import format_bytes
from ...engine.errors import ConfigError
from ...engine.files import write_whole
from ...engine.placement.placement import Placement
from ...engine.tracing.ledger import KINDS
from .forecast import Forecast

_MOST_GROUPS, _MOST_UNITS = 128, 512  # that are drawn
_COLOURS = dict(
    zip(KINDS, ("#2f5d8a", "#5b9bd5", "#9cc3e6", "#b9a5d6", "#808080", "#c2c28a", "#e8a33d", "#5f9e5f"), strict=True)
)
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:32px auto;padding:0 24px}
pre{overflow-x:auto;font-size:13px} p{margin:12px 0 4px}
b{display:inline-block;width:12px;height:12px;margin:0 6px 0 16px}
.bar{display:flex;height:24px} svg{display:block;width:100%;background:#8883} path{stroke:#2f5d8a;stroke-width:.85}
rect{fill:transparent} rect:hover{fill:#8888}
"""


def write_page(path: Path, plans: Sequence[Forecast], text: str, memory: float | None) -> None:
    """Write the page of a plan.

    Args:
        path: The file. Its folder is made if it does not exist.
        plans: The plan of the run, then the plans of the other phases of a masking schedule.
        text: The plan as the terminal shows it.
        memory: The bytes of a device. They are drawn as another bar.

    Raises:
        ConfigError: The file cannot be written.
    """
    title, placement = escape(f"Plan of {plans[0].config.model['name']}"), plans[0].layout.placement
    key = "".join(f'<b style="background:{colour}"></b>{kind}' for kind, colour in _COLOURS.items())
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1>"
        f"<h2>Memory at the peak of the rank that needs most</h2>{_bars(plans, memory)}<p>{key}</p>"
        f"<h2>Which group holds which unit</h2>{draw_map(placement) if placement.units else '<p>No units.</p>'}"
        f"<h2>Every figure</h2><pre>{escape(text)}</pre></body></html>\n"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))  # a symbolic link stays a link
        if target.is_file() or not target.exists():
            write_whole(target, page)
        else:  # a pipe
            target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: the page cannot be written ({error.strerror})") from None


def _bars(plans: Sequence[Forecast], memory: float | None) -> str:
    scale = max([plan.worst.trace.peak for plan in plans] + [memory or 0])

    def part(colour: str, name: str, nbytes: float) -> str:
        title = f"{name}: {format_bytes(nbytes)}"
        return f'<i style="width:{100 * nbytes / scale:.3f}%;background:{colour}" title="{title}"></i>'

    rows = []
    for plan in plans:
        trace = plan.worst.trace
        parts = (part(_COLOURS[kind], kind, trace.at_peak.get(kind, 0)) for kind in KINDS)
        rows.append((f"{escape(plan.name)}: {format_bytes(trace.peak)}", "".join(parts)))
    if memory is not None:
        rows.append((f"a device: {format_bytes(memory)}", part("#8888", "a device", memory)))
    return "".join(f'<p>{name}</p><div class="bar">{parts}</div>' for name, parts in rows)


def draw_map(placement: Placement) -> str:
    """Draw which group holds which unit, with a column for each unit and a row for each group.

    If the mouse points at a column, the page shows the name and the holders of the unit.
    """
    units, groups = min(len(placement.units), _MOST_UNITS), min(placement.groups, _MOST_GROUPS)
    held = "".join(
        f"M{unit} {group}h.9" for unit in range(units) for group in placement.holders[unit] if group < groups
    )
    columns = []
    for unit in range(units):
        holders = placement.holders[unit]
        title = f"{placement.units[unit]}: k = {len(holders)}, held by {', '.join(map(str, holders))}"
        columns.append(f'<rect x="{unit}" width="1" height="{groups}"><title>{escape(title)}</title></rect>')
    height = groups * (18 if groups <= 16 else 5)
    return (
        f'<svg viewBox="0 0 {units} {groups}" preserveAspectRatio="none" style="height:{height}px">'
        f'<path d="{held}" transform="translate(0 .5)"/>{"".join(columns)}</svg>'
        f"<p>Across: the first {units} of {len(placement.units)} units, from {escape(placement.units[0])}. "
        f"Down: the first {groups} of {placement.groups} groups. Blue: the group holds the unit.</p>"
    )
