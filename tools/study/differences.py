"""Differences between the rows of a grid, seed by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .runs import mean_and_spread


def differences_from(references: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how far every row is from each of the rows ``references`` in the same column.

    Runs with the same seed are compared. A cell without a common seed is left out.

    Args:
        references: names of rows.
        found: the cells, with their loss of every seed, or None, in ``by_seed``.
    """
    return [each for reference in references for each in _from(reference, found)]


def _from(reference: str, found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    references = {each["column"]: each["by_seed"] for each in found if each["row"] == reference}
    for each in found:
        if each["row"] == reference or each["column"] not in references:
            continue
        pairs = zip(each["by_seed"], references[each["column"]], strict=True)
        values = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        if values:
            yield {"row": each["row"], "column": each["column"], "less": reference, **mean_and_spread(values)}


def difference_tables(references: Sequence[str], columns: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """Write a Markdown table for each reference that was trained."""
    text = ""
    for reference in references:
        own = {(each["row"], each["column"]): each for each in found if each["less"] == reference}
        if not own:
            continue
        lines = [f"| less {reference} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for row in dict.fromkeys(row for row, _ in own):
            lines.append(f"| {row} | {' | '.join(_text(own.get((row, column))) for column in columns)} |")
        text += "\n\n" + "\n".join(lines)
    return text


def _text(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "–"
    return f"{one['mean']:+.4f}" + ("" if one["spread"] is None else f" ± {one['spread']:.4f}")
