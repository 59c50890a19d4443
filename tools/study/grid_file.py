"""A grid's file: the cells of a table, and the run of each cell."""

from __future__ import annotations

import itertools
import json
import math
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...engine.config.load import load_config
from ...engine.config.section import Section, parse_section
from ...engine.errors import ConfigError, shorten
from ...engine.json_files import JsonError, read_json_file
from ..shared.config_checks import check_names
from .equal_cost import EqualCost

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
        tune: by dotted key, the values that are tried in each cell.
        tune_seeds: with how many seeds these values are tried.
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
    tune_seeds: Annotated[int, Field(gt=0, le=1000)] = 1
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
    runs = cells * (math.prod(map(len, grid.tune.values())) * grid.tune_seeds + grid.seeds - grid.tune_seeds)
    if runs > MOST_RUNS:
        raise ConfigError(f"{path}: {runs:,} runs, and a grid may have {MOST_RUNS:,}; use fewer rows or values")
    if grid.tune_seeds > grid.seeds:
        raise ConfigError(f"{path}: tune_seeds: {grid.tune_seeds} is more than the {grid.seeds} seeds of a cell")
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
    """The runs that choose values: the first seeds, with every cell and every choice."""
    return [
        GridRun(grid, *cell, choice, seed)
        for seed in range(grid.tune_seeds)
        for cell in grid.cells()
        for choice in grid.choices()
    ]
