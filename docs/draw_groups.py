"""Draw docs/images/groups.svg: which group holds which block, and what is averaged.

Run ``python docs/draw_groups.py`` after a change. The placement in the picture is the engine's own:
the quickstart's eight blocks over four groups at capacity 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from sdp.engine.config import load_config
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model

ROOT = Path(__file__).parent.parent
CELL, GAP, LEFT, TOP, ROW = 62, 14, 110, 50, 62
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2937 } .small { font-size: 12px; fill: #6b7280 }
.held { fill: #2563eb } .shared { fill: #7c3aed } .on { fill: #ffffff }
.skip { stroke: #9ca3af; stroke-width: 2; stroke-dasharray: 4 4 } .path { stroke: #9ca3af; stroke-width: 2 }
.average { stroke: #ea580c; stroke-width: 3; fill: none } .word { fill: #ea580c }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .small { fill: #9ca3af } .on { fill: #ffffff } .word { fill: #fb923c }
}
"""


def holders_of_blocks() -> tuple[int, list[tuple[int, ...]]]:
    """The number of groups, and the groups that hold each block, by the quickstart's
    configuration.
    """
    config = load_config(ROOT / "configs" / "quickstart.json")
    with torch.device("meta"):
        layout = Layout.of(build_model(config.model, vocab_size=512), config, mesh_of(config, config.sdp.groups))
    return config.sdp.groups, list(layout.placement.holders)


def column(index: int) -> int:
    """The left edge of column ``index``: 0 is the embedding, then the blocks, then the head."""
    return LEFT + index * (CELL + GAP)


def row(group: int) -> int:
    return TOP + group * ROW


def box(index: int, group: int, kind: str, word: str) -> str:
    x, y = column(index), row(group)
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL}" height="36" rx="6"/>'
        f'<text class="on" x="{x + CELL / 2}" y="{y + 23}" text-anchor="middle">{word}</text>'
    )


def average(index: int, holders: tuple[int, ...]) -> Iterator[str]:
    """The connection between the holders of a block, whose gradients are averaged."""
    x = column(index) + CELL - 4
    ordered = sorted(holders)
    for first, second in pairwise(ordered):
        if second == first + 1:
            yield f'<path class="average" d="M {x - 24} {row(first) + 36} V {row(second)}"/>'
        else:  # around the boxes in between
            top, bottom = row(first) + 18, row(second) + 18
            yield f'<path class="average" d="M {x + 4} {top} h 8 V {bottom} h -8"/>'


def draw() -> str:
    groups, holders = holders_of_blocks()
    last = len(holders) + 1
    width, height = column(last) + CELL + 20, row(groups) + 20
    names = ((0, "embedding"), ((1 + len(holders)) / 2, "residual blocks"), (last, "head"))
    parts = [
        f'<text x="{LEFT + index * (CELL + GAP) + CELL / 2}" y="28" text-anchor="middle">{name}</text>'
        for index, name in names
    ]
    for group in range(groups):
        y = row(group) + 18
        parts.append(f'<line class="path" x1="{column(0)}" y1="{y}" x2="{column(last) + CELL}" y2="{y}"/>')
        parts.append(
            f'<text x="10" y="{y - 2}">group {group}</text><text class="small" x="10" y="{y + 14}">own data</text>'
        )
        parts += [box(0, group, "shared", "all"), box(last, group, "shared", "all")]
        parts += [box(1 + block, group, "held", str(block)) for block, of in enumerate(holders) if group in of]
    for block, of in enumerate(holders):
        parts += average(1 + block, of)
    for shared in (0, last):
        parts += average(shared, tuple(range(groups)))
    parts.append(
        f'<text class="word" x="{column(0)}" y="{height - 10}">Orange: gradients are averaged between the groups that '
        "hold the block. No activations leave a group.</text>"
    )
    title = f"{groups} groups and {len(holders)} blocks: which group holds which block, and what is averaged"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    target = ROOT / "docs" / "images" / "groups.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(draw(), encoding="utf-8")
