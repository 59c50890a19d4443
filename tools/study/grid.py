"""``sdp study grid GRID OUT``: train the cells of a table, each over several seeds.

GRID is a JSON file:

    {"title": "…", "seeds": 3, "base": {a configuration},
     "rows": {"dense": {"sdp.groups": 1}, …}, "columns": {"every step": {}, "H = 8":
     {"sdp.sync.every": 8}, …}, "skip": [["dense", "H = 8"]], "tune": {"optimizer.params.lr":
     [0.003, 0.006]}}

A cell is the base with the settings of its row and of its column. With ``tune``, every cell is
first trained with each value and one seed. The other seeds have the value with the lowest loss.
With ``"equal_cost": {"reference": "dense", "device": "400TFLOP/s", "links": ["1Gbit/s"]}``, whose
columns must be lengths of training, rows are also compared at equal operations and seconds.
Finished runs are not repeated, so a grid can be stopped and continued. OUT/results.json alone is
enough for that, also on another machine.

With ``"compare_with": ["dense"]`` there is also a table of differences from that row, taken seed by
seed, because runs with the same seed read the same samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...engine.config.load import load_config
from ...engine.config.section import Section, parse_section
from ...engine.environment.child import usable_cores
from ...engine.errors import ConfigError, escape, shorten
from ...engine.json_files import JsonError, read_json_file
from ..shared.arguments import positive_int
from ..shared.config_checks import check_names
from ..shared.files import make_folder, write_own
from .differences import difference_tables, differences_from
from .equal_cost import EqualCost, compare, comparison_tables, step_costs
from .plot import plot_grid
from .runs import figures_of, prepared_data, result_of, run_all, text_of

Settings = dict[str, Any]  # values by dotted keys

MOST_RUNS = 10_000
MOST_NAME = 200  # characters; a file name may have 255, and a suffix follows


class Grid(Section):
    """The content of a grid's file.

    Attributes:
        title: what the table shows.
        base: the configuration that all cells share.
        rows, columns: by name, what cells of a row or column have in addition, by dotted keys.
        skip: cells that are left out, as pairs of row and column.
        tune: by dotted key, the values that are tried with the first seed.
        seeds: the number of seeds of a cell.
        equal_cost: at which equal costs rows are compared, if the columns are lengths of training.
        early_stopping: how often a run is evaluated. The lowest held-out loss counts. None: a run
            is evaluated after its last step only.
        compare_with: rows, from which the differences of all rows are given too.
    """

    title: str
    base: dict[str, Any]
    rows: dict[str, Settings] = Field(min_length=1)
    columns: dict[str, Settings] = Field(min_length=1)
    skip: list[list[str]] = Field(default=[])
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={})
    seeds: Annotated[int, Field(gt=0, le=1000)] = 3
    equal_cost: EqualCost | None = None
    early_stopping: Annotated[int, Field(ge=2, le=1000)] | None = None
    compare_with: list[str] = Field(default=[])

    @property
    def counts(self) -> str:
        """The key of :func:`result_of` that counts for a run: "loss" or "least"."""
        return "loss" if self.early_stopping is None else "least"

    def cells(self) -> list[tuple[str, str]]:
        """The cells that are trained, as pairs of row and column."""
        return [cell for cell in itertools.product(self.rows, self.columns) if list(cell) not in self.skip]

    def choices(self) -> list[Settings]:
        """The values that are tried in every cell. One empty choice if nothing is tuned."""
        return [dict(zip(self.tune, values, strict=True)) for values in itertools.product(*self.tune.values())]


def read_grid(path: Path) -> Grid:
    """Read a grid. Raises ConfigError for a file that is not one, or whose cells are not valid."""
    try:
        raw = read_json_file(path, unique_keys=True)
    except (JsonError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a grid is a JSON object with title, base, rows and columns")
    grid = parse_section(Grid, raw, str(path))
    for cell in grid.skip:
        if len(cell) != 2 or cell[0] not in grid.rows or cell[1] not in grid.columns:
            raise ConfigError(
                f"{path}: skip: {shorten(json.dumps(cell))} is not a pair of a row and a column of this grid"
            )
    _check_count(grid, path)
    if unknown := [row for row in grid.compare_with if row not in grid.rows]:
        raise ConfigError(f"{path}: compare_with: {shorten(unknown[0])} is not a row of this grid")
    if (equal := grid.equal_cost) is not None:
        if equal.reference not in grid.rows:
            raise ConfigError(f"{path}: equal_cost.reference: {shorten(equal.reference)} is not a row of this grid")
        _require_lengths(grid, path)
        try:
            equal.machines(1)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    by_name: dict[str, GridRun] = {}
    for run in first_runs(grid):
        where = f"{path}: {shorten(run.row)}, {shorten(run.column)}"
        try:
            check_names(load_config(run.config(None)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if len(run.name) > MOST_NAME:
            raise ConfigError(
                f"{where}: its directory's name would have {len(run.name)} characters, and {MOST_NAME} fit; use "
                "shorter names"
            )
        if (other := by_name.setdefault(run.name, run)) is not run:
            raise ConfigError(
                f"{where}: its directory would be {run.name}, as that of {shorten(other.row)}, "
                f"{shorten(other.column)}; use names that differ in letters, digits, dots or hyphens"
            )
    return grid


def _require_lengths(grid: Grid, path: Path) -> None:
    """Raise ConfigError if a column changes what a step costs, and not only how many there are."""
    for column, settings in grid.columns.items():
        for key in settings:
            if not key.startswith(("training.steps", "training.tokens", "scheduler.")):
                raise ConfigError(
                    f"{path}: equal_cost: column {shorten(column)} has {shorten(key)}, which changes more than "
                    "the length; remove equal_cost, or make it a row"
                )


def _check_count(grid: Grid, path: Path) -> None:
    """Raise ConfigError if the grid has no runs, or too many to list."""
    cells = len(grid.rows) * len(grid.columns)
    runs = cells * (math.prod(map(len, grid.tune.values())) + grid.seeds - 1)
    if runs > MOST_RUNS:
        raise ConfigError(f"{path}: {runs:,} runs, and a grid may have {MOST_RUNS:,}; use fewer rows or values")
    if not grid.cells():
        raise ConfigError(f"{path}: skip: leaves no cell; remove a pair")


@dataclass(frozen=True)
class GridRun:
    """One run of a cell."""

    grid: Grid
    row: str
    column: str
    choice: Settings
    seed: int

    @property
    def name(self) -> str:
        values = (f"{key.rpartition('.')[2]}{value}" for key, value in self.choice.items())
        text = "-".join([self.row, self.column, *values, f"seed{self.seed}"])
        return re.sub(r"[^A-Za-z0-9.-]+", "_", text)

    def config(self, data: Path | None) -> dict[str, Any]:
        config = deepcopy(self.grid.base)
        settings = self.grid.rows[self.row] | self.grid.columns[self.column] | self.choice
        for key, value in settings.items():
            *sections, last = key.split(".")
            inner = config
            for section in sections:
                inner = inner.setdefault(section, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"{key}: {section} is not a section")
            inner[last] = deepcopy(value)
        training = config.setdefault("training", {})
        if not isinstance(training, dict):
            return config  # which is refused
        steps = training.get("steps", 0)
        every = steps // (self.grid.early_stopping or 1) if isinstance(steps, int) else steps
        training |= {"seed": self.seed, "evaluate_every": every, "save_every": 0}
        config.setdefault("steps_per_print", 10**6)
        if data is not None:
            config.setdefault("data", {})["path"] = str(data)
        return config


def first_runs(grid: Grid) -> list[GridRun]:
    """The runs with the first seed: every cell with every choice."""
    return [GridRun(grid, *cell, choice, 0) for cell in grid.cells() for choice in grid.choices()]


def best_choice(grid: Grid, cell: tuple[str, str], out: Path) -> Settings | None:
    """The choice with which the cell's first seed has the lowest loss. None if no run of it is
    done.
    """
    done = [(result_of(GridRun(grid, *cell, choice, 0), out), choice) for choice in grid.choices()]
    losses = [(result[grid.counts], index) for index, (result, _) in enumerate(done) if result is not None]
    return done[min(losses)[1]][1] if losses else None


def later_runs(grid: Grid, out: Path) -> Iterator[GridRun]:
    """The runs with the other seeds, seeds outermost."""
    best = {cell: best_choice(grid, cell, out) for cell in grid.cells()}
    for seed in range(1, grid.seeds):
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
    text = escape(text)
    write_own(out / "grid.json", json.dumps(content, indent=1) + "\n")
    write_own(out / "grid.md", text + "\n")
    if found:
        plot_grid(found, list(grid.columns), out / "grid.png")
    return text


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
