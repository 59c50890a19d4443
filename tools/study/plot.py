"""Draws the figures of a sweep as a PNG file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..shared.plots import COLOURS, SIZE_INCHES, dress, new_figure, plain, save_figure


def plot_sweep(figures: Mapping[str, Sequence[Mapping[str, Any]]], measure: str, path: Path) -> Path:
    """Draw the figures of a sweep into the PNG ``path`` and return it.

    There is a panel for each key of ``figures``. It shows ``measure`` against capacity, with a line
    for each profile and the standard deviation over the seeds. A row of ``figures`` has capacity,
    profile, mean and spread. The spread is None if there was one seed.
    """
    figure = new_figure((SIZE_INCHES[0], 5.0))
    panels = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(panels, figures.items(), strict=True):
        for colour, profile in zip(itertools.cycle(COLOURS), dict.fromkeys(row["profile"] for row in rows)):
            own = [row for row in rows if row["profile"] == profile]
            spreads = [row["spread"] or 0.0 for row in own]
            axes.errorbar(
                [row["capacity"] for row in own], [row["mean"] for row in own], spreads, color=colour, label=profile,
                capsize=4,
                marker="o", linestyle="--" if "dense" in profile else "-",
            )  # fmt: skip
        dress(axes, title, "capacity")
        capacities = [row["capacity"] for row in rows]
        axes.set_xlim(min(capacities) - 0.05, max(capacities) + 0.05)
        axes.set_ylabel("")
    panels[0].set_ylabel(f"{measure} of the full model, held out", fontsize=12)
    panels[-1].legend(frameon=False, fontsize=11)
    return save_figure(figure, path)


def plot_grid(figures: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> Path:
    """Draw the cells of a grid into the PNG ``path`` and return it.

    There is a line for each row of the table. A figure has row, column, mean and spread.
    """
    figure = new_figure((SIZE_INCHES[0], 5.0))
    axes = figure.subplots()
    for colour, row in zip(itertools.cycle(COLOURS), dict.fromkeys(each["row"] for each in figures)):
        own = [each for each in figures if each["row"] == row]
        axes.errorbar(
            [columns.index(each["column"]) for each in own], [each["mean"] for each in own],
            [each["spread"] or 0.0 for each in own], color=colour, label=plain(row), capsize=4, marker="o",
            linestyle="--" if "dense" in row else "-",
        )  # fmt: skip
    dress(axes, "held-out loss of the full model", "")
    axes.set_xticks(range(len(columns)), [plain(column) for column in columns])
    axes.legend(frameon=False, fontsize=11)
    return save_figure(figure, path)
