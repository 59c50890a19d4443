"""Reads a grid's file, which describes a table of runs, and lists the runs of each cell.

    {"title": "…", "simulate": true, "seeds": 3, "base": {a configuration},
     "rows": {"dense": {"sdp.capacity": 1.0}, "backward": {"sdp.masking": "backward"}},
     "columns": {"8 workers": {"sdp.groups": 8}, "32 workers": {"sdp.groups": 32}},
     "skip": [["dense", "32 workers"]], "tune": {"optimizer.params.lr": [0.004, 0.008]}}

A cell is the configuration ``base`` with the settings of its row and of its column. With ``tune``,
every cell is first trained with each value and one seed, or with ``"tune_seeds": 2`` with two. The
other seeds have the value with the lowest mean loss.
"""

from __future__ import annotations

import itertools
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from sdp.engine.config.load import load_config
from sdp.engine.config.section import Section, parse_section
from sdp.engine.errors import ConfigError, SDPError
from sdp.engine.json_files import JsonError, read_json_file

from ..simulator.training import require_followed
from .equal_cost import EqualCost

Settings = dict[str, Any]  # values by dotted keys
Positive = Annotated[int, Field(gt=0)]


class Grid(Section):
    """The content of a grid's file. Settings have dotted keys, such as "sdp.groups".

    Attributes:
        title: What the table shows.
        base: The configuration that all cells share.
        rows, columns: By name, the settings of all cells in a row or column.
        skip: Cells that are left out, as pairs of row and column.
        simulate: Whether all groups of a run are in one process. If not, ``sdp train`` runs.
        tune: By key, the values that are tried in each cell.
        also_try: More values for the keys of ``tune`` in single cells, by row and column. Useful
            where a cell's best value is the lowest or highest that was tried.
        tune_seeds: The number of seeds with which these values are tried.
        seeds: The number of seeds of a cell.
        equal_cost: At which equal costs rows are compared, if the columns are lengths of training.
        early_stopping: How often a run is evaluated. The lowest held-out loss counts. If None, a
            run is evaluated after its last step only.
        compare_with: Rows that are subtracted from all rows, in tables of differences.
    """

    title: str
    base: dict[str, Any]
    rows: dict[str, Settings] = Field(min_length=1)
    columns: dict[str, Settings] = Field(min_length=1)
    skip: list[list[str]] = Field(default=[])
    simulate: bool = False
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={})
    also_try: dict[str, dict[str, dict[str, Annotated[list[Any], Field(min_length=1)]]]] = Field(default={})
    tune_seeds: Positive = 1
    seeds: Positive = 3
    equal_cost: EqualCost | None = None
    early_stopping: Positive | None = None
    compare_with: list[str] = Field(default=[])

    def cells(self) -> list[tuple[str, str]]:
        """Return the cells that are trained, as pairs of row and column."""
        return [cell for cell in itertools.product(self.rows, self.columns) if list(cell) not in self.skip]

    def choices(self, row: str, column: str) -> list[Settings]:
        """Return the settings that a cell tries. If nothing is tuned, one empty choice."""
        of_cell = self.also_try.get(row, {}).get(column)
        return [
            dict(zip(values, chosen, strict=True))
            for values in (self.tune, *([of_cell] if of_cell else []))
            for chosen in itertools.product(*values.values())
        ]

    def first_runs(self) -> list[GridRun]:
        """Return the runs that choose values: every cell with every choice, and the first seeds."""
        return [
            GridRun(self, *cell, choice, seed)
            for seed in range(self.tune_seeds)
            for cell in self.cells()
            for choice in self.choices(*cell)
        ]


@dataclass(frozen=True)
class GridRun:
    """One run of a cell: with one choice of the tuned values, and one seed."""

    grid: Grid
    row: str
    column: str
    choice: Settings
    seed: int

    @property
    def name(self) -> str:
        values = (f"{key.rpartition('.')[2]}{value}" for key, value in self.choice.items())
        return re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join([self.row, self.column, *values, f"seed{self.seed}"]))

    def config(self, data: Path | None = None) -> dict[str, Any]:
        """Return the run's configuration. ``data`` is the prepared corpus that all runs share."""
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
        every = training.get("steps", 0) // (self.grid.early_stopping or 1)
        training |= {"save_every": 0} | training | {"seed": self.seed, "evaluate_every": every}
        config.setdefault("steps_per_print", 10**6)
        if data is not None:
            config.setdefault("data", {})["path"] = str(data)
        return config


def read_grid(path: Path, *, compiled: bool = False) -> Grid:
    """Read a grid's file.

    Args:
        path: The file.
        compiled: Whether runs compile their blocks.

    Raises:
        ConfigError: It is not the file of a grid, or a cell is not valid.
    """
    try:
        grid = parse_section(Grid, read_json_file(path, unique_keys=True), str(path))
    except (JsonError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    equal = grid.equal_cost
    for row in [*grid.compare_with, *([equal.reference] if equal is not None else [])]:
        if row not in grid.rows:
            raise ConfigError(f"{path}: {row} is not a row of this grid")
    for pair in grid.skip:
        if tuple(pair) not in itertools.product(grid.rows, grid.columns):
            raise ConfigError(f"{path}: skip: {pair} is not a pair of a row and a column of this grid")
    for row, column, values in ((row, *cell) for row, cells in grid.also_try.items() for cell in cells.items()):
        if (row, column) not in grid.cells():
            raise ConfigError(f"{path}: also_try: {row}, {column} is no cell that this grid trains")
        if values.keys() != grid.tune.keys():
            raise ConfigError(f"{path}: also_try: {row}, {column} needs values for each key of tune, and no other")
    if equal is not None:
        _require_lengths(grid, path)
        equal.machines(1)
    by_name: dict[str, GridRun] = {}
    for run in grid.first_runs():
        where = f"{path}: {run.row}, {run.column}"
        try:
            config = load_config(run.config(), ["training.compile=true"] if compiled else [])
            if grid.simulate:
                require_followed(config)
        except SDPError as error:
            raise ConfigError(f"{where}: {error}") from None
        other = by_name.setdefault(run.name, run)
        if other is not run and (other.row, other.column) == (run.row, run.column):
            raise ConfigError(f"{where}: tries {run.choice} twice; remove one")
        if other is not run:
            raise ConfigError(f"{where}: its runs would have the name of {other.row}, {other.column}; rename one")
    return grid


def _require_lengths(grid: Grid, path: Path) -> None:
    """Raise ConfigError if a column changes what a step costs, and not only how many there are."""
    for column, settings in grid.columns.items():
        for key in settings:
            if not key.startswith(("training.steps", "scheduler.")):
                raise ConfigError(
                    f"{path}: equal_cost: column {column} has {key}, which changes more than the length; remove "
                    "equal_cost, or make it a row"
                )
