"""``sdp study grid GRID OUT``: train the cells of a table, each over several seeds.

GRID is a JSON file:

    {"title": "…", "seeds": 3, "base": {a configuration},
     "rows": {"dense": {"sdp.groups": 1}, …}, "columns": {"every step": {}, "H = 8":
     {"sdp.sync.every": 8}, …}, "skip": [["dense", "H = 8"]], "tune": {"optimizer.params.lr":
     [0.003, 0.006]}}

A cell is the base with the settings of its row and of its column. With ``tune``, every cell is
first trained with each value and one seed, or with ``"tune_seeds": 2`` with two. The other seeds
have the value with the lowest mean loss.
With ``"equal_cost": {"reference": "dense", "device": "400TFLOP/s", "links": ["1Gbit/s"]}``, whose
columns must be lengths of training, rows are also compared at equal operations and seconds.
Finished runs are not repeated, so a grid can be stopped and continued. OUT/results.json alone is
enough for that, also on another machine.

With ``"compare_with": ["dense"]`` there is also a table of differences from that row, taken seed by
seed, because runs with the same seed read the same samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.environment.child import usable_cores
from ...engine.errors import escape
from ..shared.arguments import positive_int
from ..shared.files import make_folder, write_own
from .differences import difference_tables, differences_from
from .equal_cost import compare, comparison_tables, step_costs
from .grid_file import Grid, GridRun, Settings, first_runs, read_grid
from .plot import plot_grid
from .runs import figures_of, prepared_data, result_of, run_all, text_of


def best_choice(grid: Grid, cell: tuple[str, str], out: Path) -> Settings | None:
    """The choice with the lowest mean loss over the first ``grid.tune_seeds`` seeds.

    Choices of which a run is missing do not count. None if no choice is complete.
    """
    means = []
    for index, choice in enumerate(grid.choices()):
        results = [result_of(GridRun(grid, *cell, choice, seed), out) for seed in range(grid.tune_seeds)]
        losses = [result[grid.counts] for result in results if result is not None]
        if len(losses) == grid.tune_seeds:
            means.append((statistics.mean(losses), index))
    return grid.choices()[min(means)[1]] if means else None


def later_runs(grid: Grid, out: Path) -> Iterator[GridRun]:
    """The runs with the other seeds, seeds outermost."""
    best = {cell: best_choice(grid, cell, out) for cell in grid.cells()}
    for seed in range(grid.tune_seeds, grid.seeds):
        for cell, choice in best.items():
            if choice is not None:
                yield GridRun(grid, *cell, choice, seed)


def figures(grid: Grid, out: Path) -> list[dict[str, Any]]:
    """Return mean and deviation of every cell of which a run is done."""
    found = []
    for cell in grid.cells():
        choice = best_choice(grid, cell, out)
        runs = [GridRun(grid, *cell, choice, seed) for seed in range(grid.seeds)] if choice is not None else []
        if row := figures_of(runs, out, grid.counts):
            found.append({"row": cell[0], "column": cell[1], "tuned": choice, **row})
    return found


def report(grid: Grid, out: Path, data: Path | None = None) -> str:
    """Return the table of everything that is done as Markdown. Also writes it to OUT, with figures
    and a plot.

    ``data``: the corpus of all runs, which the costs of steps need.
    """
    found = figures(grid, out)
    what = "held-out loss of the full model" if grid.early_stopping is None else "lowest held-out loss of a run"
    text = f"{grid.title}: {what}, mean ± deviation of {grid.seeds} seeds\n\n{table(grid, found)}"
    content: dict[str, Any] = {"title": grid.title, "cells": found}
    if grid.equal_cost is not None:
        compared = compare(found, _costs(grid, found, data), grid.equal_cost)
        content["equal_cost"] = [asdict(one) for one in compared]
        text += f"\n\n{comparison_tables(compared, grid.equal_cost)}"
    if grid.compare_with:
        differences = content["differences"] = differences_from(grid.compare_with, found)
        text += difference_tables(grid.compare_with, list(grid.columns), differences)
    times = run_times(grid, out)
    if times:
        content["training_time"] = {"runs": len(times), "hours": sum(times) / 3600}
        text += f"\n\n{len(times)} runs trained for {sum(times) / 3600:.1f} hours together, one core each."
    text = escape(text)
    write_own(out / "grid.json", json.dumps(content, indent=1) + "\n")
    write_own(out / "grid.md", text + "\n")
    if found:
        plot_grid(found, list(grid.columns), out / "grid.png")
    return text


def run_times(grid: Grid, out: Path) -> list[float]:
    """Return the seconds of every run that is done and whose time is known."""
    runs = {run.name: run for run in (*first_runs(grid), *later_runs(grid, out))}
    results = [result_of(run, out) for run in runs.values()]
    return [result["seconds"] for result in results if result is not None and "seconds" in result]


def _costs(grid: Grid, found: Sequence[Mapping[str, Any]], data: Path | None) -> dict[str, dict[str, float]]:
    """Return what a step of each row costs. It does not depend on the length of training."""
    first = {each["row"]: each["column"] for each in reversed(found)}
    wanted = grid.equal_cost
    assert wanted is not None
    return {row: step_costs(GridRun(grid, row, column, {}, 0).config(data), wanted) for row, column in first.items()}


def table(grid: Grid, found: Sequence[Mapping[str, Any]]) -> str:
    """Write the figures as a Markdown table."""
    by_cell = {(each["row"], each["column"]): each for each in found}
    lines = [f"| | {' | '.join(grid.columns)} |", "|---" * (len(grid.columns) + 1) + "|"]
    for row in grid.rows:
        cells = (_text(grid, by_cell.get((row, column))) for column in grid.columns)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(grid: Grid, found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    tuned = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in found["tuned"].items())
    missing = "" if found["seeds"] == grid.seeds else f", {found['seeds']} of {grid.seeds} seeds"
    more = f" ({(tuned + missing).removeprefix(', ')})" if tuned or missing else ""
    return text_of(found) + more


@dataclass(frozen=True)
class GridOptions:
    """The grid, the folder of its runs, and how many run at a time."""

    grid: Grid
    out: Path
    jobs: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GridOptions:
        """Take the parsed arguments. Raises ConfigError for a grid that is not valid."""
        return cls(read_grid(args.grid), args.out, args.jobs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("grid", metavar="GRID", type=Path, help="JSON file with base, rows and columns")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of runs, table and plot")
    parser.add_argument(
        "--jobs", type=positive_int, default=usable_cores(), help="runs at a time, one thread each (default: the cores)"
    )


def run(args: argparse.Namespace) -> int:
    """Run what is missing of the grid, and print its table. Exit code 1: a run failed."""
    options = GridOptions.from_args(args)
    grid, out = options.grid, options.out
    make_folder(out)
    first = first_runs(grid)
    data = prepared_data(first[0].config(None), out)
    failed = list(run_all(first, out, data, options.jobs))
    failed += run_all(list(later_runs(grid, out)), out, data, options.jobs)
    print(report(grid, out, data))
    return 1 if failed else 0
