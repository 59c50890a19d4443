"""Makes the table, the differences and the plot of a grid, from the results of its runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdp.tools.runs.plot import COLOURS, SIZE_INCHES, dress, new_figure, plain, save_figure

from .equal_cost import compare, comparison_tables, step_costs
from .grid_file import Grid, GridRun, Settings
from .runs import Results


def best_choice(grid: Grid, cell: tuple[str, str], results: Results) -> Settings | None:
    """Return the choice with the lowest mean loss over the first ``grid.tune_seeds`` seeds.

    A choice with a missing run does not count. Returns None if no choice has all of its runs.
    """
    means = []
    for index, choice in enumerate(grid.choices(*cell)):
        losses = _losses(grid, cell, choice, grid.tune_seeds, results)
        if None not in losses:
            means.append((statistics.mean(loss for loss in losses if loss is not None), index))
    return grid.choices(*cell)[min(means)[1]] if means else None


def later_runs(grid: Grid, results: Results) -> Iterator[GridRun]:
    """Yield the runs with all other seeds, in which each cell has its best choice."""
    best = {cell: best_choice(grid, cell, results) for cell in grid.cells()}
    for seed in range(grid.tune_seeds, grid.seeds):
        for cell, choice in best.items():
            if choice is not None:
                yield GridRun(grid, *cell, choice, seed)


def _losses(grid: Grid, cell: tuple[str, str], choice: Settings, seeds: int, results: Results) -> list[float | None]:
    found = [results.of(GridRun(grid, *cell, choice, seed)) for seed in range(seeds)]
    least = grid.early_stopping is not None
    return [None if result is None else result.counted(least=least) for result in found]


def figures(grid: Grid, results: Results) -> list[dict[str, Any]]:
    """Return mean and deviation of the loss of every cell with a finished run."""
    cells = []
    for cell in grid.cells():
        choice = best_choice(grid, cell, results)
        if choice is None:
            continue
        losses = _losses(grid, cell, choice, grid.seeds, results)
        first = results.of(GridRun(grid, *cell, choice, 0))
        assert first is not None
        found = {"tuned": choice, **mean_and_spread([loss for loss in losses if loss is not None])}
        cells.append({"row": cell[0], "column": cell[1], **found, "steps": first.step, "by_seed": losses})
    return cells


def mean_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the sample deviation and the number of values.

    The deviation is None for a single value, or if a value is infinite.
    """
    is_finite = all(map(math.isfinite, values))
    spread = statistics.stdev(values) if len(values) > 1 and is_finite else None
    return {"mean": statistics.mean(values), "spread": spread, "seeds": len(values)}


def differences_from(references: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the difference of every row from each row of ``references``, column by column.

    Losses of the same seed are subtracted, because these runs read the same samples. A cell without
    a common seed is left out.
    """
    differences = []
    for reference in references:
        losses = {cell["column"]: cell["by_seed"] for cell in cells if cell["row"] == reference}
        for cell in cells:
            pairs = zip(cell["by_seed"], losses.get(cell["column"], ()), strict=False)
            values = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
            if values and cell["row"] != reference:
                where = {"row": cell["row"], "column": cell["column"], "less": reference}
                differences.append({**where, **mean_and_spread(values)})
    return differences


def report(grid: Grid, out: Path, results: Results, data: Path | None = None) -> str:
    """Return Markdown tables of all finished runs. Also write them, figures and a plot.

    Args:
        grid: The grid.
        out: The folder of the grid, to which files are written.
        results: The results of the runs, whose file gets the figures.
        data: The corpus of all runs. The costs of steps are planned with it.
    """
    cells, columns = figures(grid, results), list(grid.columns)
    what = "held-out loss of the full model" if grid.early_stopping is None else "lowest held-out loss of a run"
    texts = [
        f"{grid.title}: {what}, mean ± deviation of {grid.seeds} seeds",
        _table("", grid.rows, columns, {(cell["row"], cell["column"]): _text(grid, cell) for cell in cells}),
    ]
    content: dict[str, Any] = {"title": grid.title, "cells": cells}
    if grid.equal_cost is not None:
        first = {cell["row"]: cell["column"] for cell in reversed(cells)}  # costs do not depend on the length
        configs = {row: GridRun(grid, row, column, {}, 0).config(data) for row, column in first.items()}
        costs = {row: step_costs(config, grid.equal_cost) for row, config in configs.items()}
        compared = compare(cells, costs, grid.equal_cost)
        content["equal_cost"] = [asdict(one) for one in compared]
        texts.append(comparison_tables(compared, grid.equal_cost))
    if grid.compare_with:
        content["differences"] = differences = differences_from(grid.compare_with, cells)
        for reference in grid.compare_with:
            own = [one for one in differences if one["less"] == reference]
            by_cell = {(one["row"], one["column"]): spread_text(one, "+.4f") for one in own}
            texts.append(_table(f"less {reference}", dict.fromkeys(one["row"] for one in own), columns, by_cell))
    runs = {run.name: run for run in (*grid.first_runs(), *later_runs(grid, results))}
    done = [results.of(run) for run in runs.values()]
    seconds = [result.seconds for result in done if result is not None and result.seconds is not None]
    if seconds:
        content["training_time"] = {"runs": len(seconds), "hours": sum(seconds) / 3600}
        texts.append(f"{len(seconds)} runs trained for {sum(seconds) / 3600:.1f} hours together, one core each.")
    text = "\n\n".join(texts)
    results.write(content)
    (out / "results.md").write_text(text + "\n", encoding="utf-8")
    if cells:
        _plot(cells, columns, out / "results.png")
    return text


def _table(corner: str, rows: Iterable[str], columns: Sequence[str], cells: Mapping[tuple[str, str], str]) -> str:
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | {' | '.join(cells.get((row, column), '–') for column in columns)} |" for row in rows]
    return "\n".join(lines)


def spread_text(figure: Mapping[str, Any], form: str = ".4f") -> str:
    """Format a mean and its deviation."""
    return f"{figure['mean']:{form}}" + ("" if figure["spread"] is None else f" ± {figure['spread']:.4f}")


def _text(grid: Grid, cell: Mapping[str, Any]) -> str:
    notes = [f"{key.rpartition('.')[2]} {value}" for key, value in cell["tuned"].items()]
    if cell["seeds"] < grid.seeds:
        notes.append(f"{cell['seeds']} of {grid.seeds} seeds")
    return spread_text(cell) + (f" ({', '.join(notes)})" if notes else "")


def _plot(cells: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Draw the cells into the PNG ``path``, with a line for each row of the table."""
    figure = new_figure((SIZE_INCHES[0], 5.0))
    axes = figure.subplots()
    for colour, row in zip(itertools.cycle(COLOURS), dict.fromkeys(cell["row"] for cell in cells)):
        own = [cell for cell in cells if cell["row"] == row]
        axes.errorbar(
            [columns.index(cell["column"]) for cell in own], [cell["mean"] for cell in own],
            [cell["spread"] or 0.0 for cell in own], color=colour, label=plain(row), capsize=4, marker="o",
            linestyle="--" if "dense" in row else "-",
        )  # fmt: skip
    dress(axes, "held-out loss of the full model", "")
    axes.set_xticks(range(len(columns)), [plain(column) for column in columns])
    axes.legend(frameon=False, fontsize=11)
    save_figure(figure, path)
