"""A plan as one HTML page that needs nothing else: bars of memory, the map of units and groups, what --fit found and why, every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ...engine.tracing.ledger import KINDS
from ..shared.quantities import format_bytes
from ..shared.table import Table
from .forecast import Forecast
from .unit_map import map_of

_LIGHT = ("#2f5d8a", "#5b9bd5", "#9cc3e6", "#b9a5d6", "#b4b4b4", "#e8a33d", "#5f9e5f")
_DARK = ("#4f87bf", "#7db2e3", "#3f6b93", "#9a86bd", "#808080", "#d8922c", "#6fb06f")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root{{color-scheme:light dark;--text:#222;--soft:#5a5f66;--page:#fafafa;--card:#fff;--line:#e1e4e8;--track:#e9edf1;--accent:#2f5d8a;
--count:#8fb3d5;--good:#2e7d32;--bad:#b3261e;--warn:#fff6e0;--warn-line:#e0b252;{light}}}
@media (prefers-color-scheme:dark){{:root{{--text:#e4e6e9;--soft:#a3a9b1;--page:#15181c;--card:#1d2126;--line:#343a41;--track:#2a2f35;
--accent:#5b9bd5;--count:#46688a;--good:#7fc784;--bad:#f28b82;--warn:#33291a;--warn-line:#a07c33;{dark}}}}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);margin:0}}
main{{max-width:980px;margin:0 auto;padding:32px 24px}}
h1{{font-size:26px;margin:0}} h2{{font-size:18px;margin:36px 0 12px}} p{{margin:6px 0;color:var(--soft)}}
.facts{{display:flex;flex-wrap:wrap;gap:10px;margin:18px 0}}
.facts div{{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 14px}}
.facts small{{display:block;color:var(--soft)}} .good{{color:var(--good)}} .bad{{color:var(--bad)}}
.warning{{background:var(--warn);border-left:4px solid var(--warn-line);color:var(--text);padding:8px 14px;margin:8px 0}}
.bar{{display:grid;grid-template-columns:130px 1fr 90px;gap:12px;align-items:center;margin:8px 0}}
.track{{position:relative;display:flex;height:28px;background:var(--track);border-radius:4px}} .track i{{display:block;height:100%}}
.limit{{position:absolute;top:-4px;bottom:-4px;border-left:2px dashed var(--bad)}}
.key span{{display:inline-block;margin-right:16px;white-space:nowrap}}
.key b{{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px}}
b.held{{background:var(--accent)}} b.absent{{background:var(--track)}} b.count{{background:var(--count)}}
.right{{text-align:right;font-variant-numeric:tabular-nums}} .wide{{overflow-x:auto}}
svg{{display:block;width:100%}} svg rect,svg path{{shape-rendering:crispEdges}} svg text{{font:11px system-ui,sans-serif;fill:var(--soft)}}
svg .held{{fill:var(--accent)}} svg .absent{{fill:var(--track)}} svg .count{{fill:var(--count)}} svg .unit{{fill:transparent}}
svg .unit:hover{{fill:var(--text);fill-opacity:.15}}
table{{border-collapse:collapse;background:var(--card);border:1px solid var(--line);font-size:13px;font-variant-numeric:tabular-nums}}
td,th{{padding:3px 14px;text-align:right;white-space:nowrap;font-weight:400}} td:first-child,th:first-child{{text-align:left}}
thead th,.head th{{font-weight:600;padding-top:9px}} td small{{color:var(--soft);margin-left:6px}}
pre,code{{font-size:13px;line-height:1.45}}
pre{{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:14px;overflow-x:auto}}
li{{color:var(--soft);margin:4px 0}} ul{{padding-left:20px}}
</style></head><body><main>
<h1>{title}</h1><p>{subtitle}</p><div class="facts">{facts}</div>{warnings}
<h2>Memory at the peak of the rank that needs most</h2>{bars}<p class="key">{key}</p>{limit}
{fit}<h2>Which group holds which unit</h2>{units}
<h2>Every figure</h2><div class="wide">{table}</div><pre>{collectives}</pre>
<h2>How to read it</h2><ul>{notes}</ul></main></body></html>
"""


def page(
    columns: list[Forecast], table: Table, collectives: str, subtitle: str, notes: list[str], memory: float | None,
    reasons: Sequence[str] = (), tried: Sequence[str] = (), commands: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """HTML of a plan and what it is compared with; ``memory``: bytes of a device, drawn as a line. ``reasons``, ``tried`` and ``commands``
    are those of a search for a layout.
    """
    plan = columns[0]
    scale = max([column.worst.trace.peak for column in columns] + ([memory] if memory else []))
    used = [kind for kind in KINDS if any(column.worst.trace.at_peak.get(kind) for column in columns)]
    placement = plan.layout.placement
    return _PAGE.format(
        title=f"Plan of {escape(str(plan.config.model['name']))}",
        light=_variables(_LIGHT),
        dark=_variables(_DARK),
        subtitle=escape(subtitle),
        facts="".join(f"<div><small>{name}</small>{value}</div>" for name, value in _facts(plan, memory)),
        warnings="".join(f'<p class="warning">Warning: {escape(warning)}</p>' for warning in plan.warnings),
        bars="".join(_bar(column, scale, memory) for column in columns),
        key="".join(f'<span><b style="background:{_colour(kind)}"></b>{kind}</span>' for kind in used),
        limit=f"<p>Dashed: the device's {format_bytes(memory)}.</p>" if memory else "",
        fit=_fit(reasons, tried, commands or {}),
        units=f"<p>{escape(placement.describe())}</p>{map_of(placement)}"
        if placement.units
        else "<p>The model has no units.</p>",
        table=_table(table),
        collectives=escape(collectives.strip()),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
    )


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--kind{index}:{colour};" for index, colour in enumerate(colours[: len(KINDS)]))


def _colour(kind: str) -> str:
    return f"var(--kind{KINDS.index(kind)})"


def _facts(plan: Forecast, memory: float | None) -> list[tuple[str, str]]:
    mesh, config, batch = plan.layout.mesh, plan.config, plan.batch
    peak = plan.worst.trace.peak
    facts = [
        ("sdp × fsdp × tp", f"{mesh.sdp} × {mesh.fsdp} × {mesh.tp}"),
        ("ZeRO stage", str(config.zero_optimization.stage)),
        ("precision", config.precision),
        ("activation checkpointing", config.activation_checkpointing.mode),
        ("samples a step", f"{batch.train:,} = {batch.micro} × {batch.accumulation} × {mesh.data_ranks}"),
        ("peak of a rank", format_bytes(peak)),
        ("expected step", f"{plan.seconds:.4g} s"),
    ]
    if memory is not None:
        verdict = (
            ("good", "fits") if peak <= memory else ("bad", f"does not fit: {format_bytes(peak - memory)} too much")
        )
        facts.append((f"of {format_bytes(memory)} a device", f'<span class="{verdict[0]}">{verdict[1]}</span>'))
    return facts


def _bar(column: Forecast, scale: float, memory: float | None) -> str:
    parts = "".join(
        f'<i style="width:{100 * nbytes / scale:.3f}%;background:{_colour(kind)}" title="{kind}: {format_bytes(nbytes)}"></i>'
        for kind in KINDS
        if (nbytes := column.worst.trace.at_peak.get(kind, 0))
    )
    line = f'<span class="limit" style="left:{100 * memory / scale:.3f}%"></span>' if memory else ""
    size = format_bytes(column.worst.trace.peak)
    return f'<div class="bar"><div>{escape(column.name)}</div><div class="track">{parts}{line}</div><div class="right">{size}</div></div>'


def _fit(reasons: Sequence[str], tried: Sequence[str], commands: Mapping[str, str]) -> str:
    if not reasons:
        return ""
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    all_tried = "".join(f"<li>{escape(each)}</li>" for each in tried)
    run = "".join(f"<p>To {name} it:</p><pre>{escape(command)}</pre>" for name, command in commands.items())
    return f"<h2>Why this layout</h2><ul>{why}</ul><details><summary>All that was tried</summary><ul>{all_tried}</ul></details>{run}"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ["", *table.header])
    rows = []
    for row in table.rows:
        if row.heading:
            rows.append(f'<tr class="head"><th colspan="{len(table.header) + 1}">{escape(row.label)}</th></tr>')
            continue
        cells = (
            f"{escape(cell.value)}{f'<small>{escape(cell.ratio)}</small>' if cell.ratio else ''}" for cell in row.cells
        )
        rows.append(f"<tr><td>{escape(row.label.strip())}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
