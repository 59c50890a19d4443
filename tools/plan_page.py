"""A plan as one HTML page that needs nothing else: stacked bars of memory, the map of units and groups, every figure."""

from __future__ import annotations

from html import escape

from ..engine.ledger import KINDS
from .forecast import Forecast
from .table import Table

_COLOURS: dict[str, str] = dict(zip(KINDS, ("#2f5d8a", "#5b9bd5", "#9cc3e6", "#b9a5d6", "#c9c9c9", "#e8a33d", "#6aa56a"), strict=True))
_MOST_GROUPS, _MOST_UNITS = 128, 256  # drawn

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fafafa;margin:0}}
main{{max-width:1000px;margin:0 auto;padding:32px 24px}}
h1{{font-size:26px;margin:0}} h2{{font-size:18px;margin:36px 0 12px}} p{{margin:6px 0;color:#555}}
.bar{{display:grid;grid-template-columns:150px 1fr 100px;gap:12px;align-items:center;margin:8px 0}}
.track{{position:relative;display:flex;height:28px;background:#eee;border-radius:4px}} .track i{{display:block;height:100%}}
.limit{{position:absolute;top:-4px;bottom:-4px;border-left:2px dashed #c0392b}}
.key span{{display:inline-block;margin-right:16px;white-space:nowrap}}
.key b{{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px}}
.right{{text-align:right;font-variant-numeric:tabular-nums}} svg text{{font:11px system-ui,sans-serif;fill:#555}}
pre{{background:#fff;border:1px solid #e3e3e3;border-radius:6px;padding:14px;overflow-x:auto;font-size:13px;line-height:1.45}}
</style></head><body><main>
<h1>{title}</h1><p>{subtitle}</p>
<h2>Memory at the peak of the rank that needs most</h2>{bars}<p class="key">{key}</p>{limit}
<h2>Which group holds which unit</h2>{units}
<h2>Every figure</h2><pre>{table}</pre><pre>{collectives}</pre>
{notes}</main></body></html>
"""


def page(columns: list[Forecast], table: Table, collectives: str, subtitle: str, notes: list[str], memory: float | None) -> str:
    """HTML of a plan and what it is compared with; ``memory``: bytes of a device, drawn as a line."""
    plan = columns[0]
    scale = max([column.worst.trace.peak for column in columns] + ([memory] if memory else []))
    used = [kind for kind in KINDS if any(column.worst.trace.at_peak.get(kind) for column in columns)]
    return _PAGE.format(
        title=f"Plan of {escape(str(plan.config.model['name']))}",
        subtitle=escape(subtitle),
        bars="".join(_bar(column, scale, memory) for column in columns),
        key="".join(f'<span><b style="background:{_COLOURS[kind]}"></b>{kind}</span>' for kind in used),
        limit=f"<p>Dashed: the device's {memory / 1e9:.2f} GB.</p>" if memory else "",
        units=_map(plan),
        table=escape(table.text()),
        collectives=escape(collectives.strip()),
        notes="".join(f"<p>{escape(note)}</p>" for note in notes),
    )


def _bar(column: Forecast, scale: float, memory: float | None) -> str:
    parts = "".join(
        f'<i style="width:{100 * nbytes / scale:.3f}%;background:{_COLOURS[kind]}" title="{kind}: {nbytes / 1e9:.3f} GB"></i>'
        for kind in KINDS
        if (nbytes := column.worst.trace.at_peak.get(kind, 0))
    )
    line = f'<span class="limit" style="left:{100 * memory / scale:.3f}%"></span>' if memory else ""
    peak = column.worst.trace.peak
    size = f"{peak / 1e9:.2f} GB" if peak >= 1e8 else f"{peak / 1e6:.2f} MB"
    return f'<div class="bar"><div>{escape(column.name)}</div><div class="track">{parts}{line}</div><div class="right">{size}</div></div>'


def _map(plan: Forecast) -> str:
    """Units downwards, groups across; a filled cell is held."""
    placement = plan.layout.placement
    if not placement.units:
        return "<p>The model has no units.</p>"
    units, groups = placement.units[:_MOST_UNITS], min(placement.groups, _MOST_GROUPS)
    high = 16 if len(units) <= 48 else 8
    wide = max(6, min(48, 720 // groups))
    label, top = 230, 20
    cells = [f'<text x="{label + group * wide + wide / 2}" y="13" text-anchor="middle">{group}</text>' for group in _ticks(groups)]
    for row, name in enumerate(units):
        y = top + row * high
        if high > 8 or row % 4 == 0:
            cells.append(f'<text x="{label - 8}" y="{y + high - 4}" text-anchor="end">{escape(name)}</text>')
        for group in range(groups):
            colour = "#2f5d8a" if placement.holds(group, row) else "#e9eef3"
            cells.append(f'<rect x="{label + group * wide}" y="{y}" width="{wide - 1}" height="{high - 1}" fill="{colour}"/>')
    size = f'width="{label + groups * wide}" height="{top + len(units) * high}"'
    left_out = "" if (groups, len(units)) == (placement.groups, len(placement.units)) else "<p>The first ones are drawn.</p>"
    return f"<p>{escape(placement.describe())}</p><svg {size}>{''.join(cells)}</svg>{left_out}"


def _ticks(groups: int) -> range:
    return range(0, groups, max(1, groups // 16))
