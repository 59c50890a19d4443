"""Which runs a grid has, how values are chosen, how it goes on, and what its tables say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sdp.data.prepare import prepare
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tools.plan.forecast import forecast
from sdp.tools.plan.machine import Machine

from lab.grid.grid_file import Grid, GridRun, read_grid
from lab.grid.peaks import peaks
from lab.grid.report import best_choice, differences_from, figures, later_runs, report
from lab.grid.runs import ROOT, Results, run_all

STUDIES = ROOT / "lab" / "studies"
GRID: dict[str, Any] = {
    "title": "Rates",
    "seeds": 2,
    "base": {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
        "data": {"sequence_length": 8, "tokenizer": "bytes"},
        "training": {"steps": 10},
        "sdp": {"groups": 2},
    },
    "rows": {"dense": {}, "half": {"sdp.capacity": 0.5}},
    "columns": {"every step": {}, "H = 5": {"sdp.sync": {"every": 5}}},
    "skip": [["dense", "H = 5"]],
    "tune": {"optimizer.params.lr": [0.1, 0.2]},
}  # fmt: skip


def _grid(folder: Path, **changes: Any) -> Grid:
    path = folder / "grid.json"
    path.write_text(json.dumps(GRID | changes), encoding="utf-8")
    return read_grid(path)


def _results(folder: Path, corpus: str | None = "x") -> Results:
    return Results(folder / "results.json", corpus)


def _note(grid: Grid, results: Results, losses: dict[tuple[str, str, float | None, int], float]) -> None:
    """Note finished runs: row, column, rate and seed, and the loss."""
    for (row, column, rate, seed), loss in losses.items():
        run = GridRun(grid, row, column, {} if rate is None else {"optimizer.params.lr": rate}, seed)
        results.add(run, [{"step": 10, "loss": loss}], 1800.0)


def test_a_cell_is_the_base_with_the_settings_of_row_and_column(tmp_path: Path) -> None:
    grid = _grid(tmp_path)
    assert grid.cells() == [("dense", "every step"), ("half", "every step"), ("half", "H = 5")]
    runs = grid.first_runs()
    assert [run.name for run in runs[-2:]] == ["half-H_5-lr0.1-seed0", "half-H_5-lr0.2-seed0"]
    config = load_config(runs[-1].config(tmp_path))
    assert config.sdp.capacity == 0.5 and config.sdp.sync is not None and config.sdp.sync.every == 5
    assert config.optimizer is not None and config.optimizer.params["lr"] == 0.2
    assert config.data.path == str(tmp_path) and GRID["base"] == grid.base, "cells share the base"


def test_other_seeds_have_the_value_with_the_lowest_loss(tmp_path: Path) -> None:
    grid, results = _grid(tmp_path), _results(tmp_path)
    dense, half = ("dense", "every step"), ("half", "H = 5")
    _note(grid, results, {(*dense, 0.1, 0): 3.0, (*dense, 0.2, 0): 2.0, (*half, 0.1, 0): 4.0})
    assert best_choice(grid, dense, results) == {"optimizer.params.lr": 0.2}
    assert [run.name for run in later_runs(grid, results)] == ["dense-every_step-lr0.2-seed1", "half-H_5-lr0.1-seed1"]
    _note(grid, results, {(*dense, 0.2, 1): 2.5})
    first, second = figures(grid, results)
    assert (first["mean"], first["seeds"], first["steps"], first["by_seed"]) == (2.25, 2, 10, [2.0, 2.5])
    assert first["spread"] == pytest.approx(0.5 / 2**0.5)
    assert (second["row"], second["column"], second["spread"]) == ("half", "H = 5", None)
    text = report(grid, tmp_path, results)
    assert "| dense | 2.2500 ± 0.3536 (lr 0.2) | – |" in text
    assert "| half | – | 4.0000 (lr 0.1, 1 of 2 seeds) |" in text
    assert "4 runs trained for 2.0 hours" in text
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == [first, second]
    assert (tmp_path / "results.png").stat().st_size > 0


def test_values_are_compared_over_as_many_seeds_as_the_grid_says(tmp_path: Path) -> None:
    """The first seed alone would choose 0.1."""
    grid, results = _grid(tmp_path, tune_seeds=2, seeds=3), _results(tmp_path)
    cell = ("dense", "every step")
    _note(grid, results, {(*cell, 0.1, 0): 2.0, (*cell, 0.1, 1): 4.0, (*cell, 0.2, 0): 2.5})
    assert best_choice(grid, cell, results) == {"optimizer.params.lr": 0.1}, "0.2 is not complete"
    _note(grid, results, {(*cell, 0.2, 1): 2.7})
    assert best_choice(grid, cell, results) == {"optimizer.params.lr": 0.2}
    assert [run.name for run in later_runs(grid, results)] == ["dense-every_step-lr0.2-seed2"]


def test_with_early_stopping_the_lowest_loss_counts(tmp_path: Path) -> None:
    grid, results = _grid(tmp_path, early_stopping=5, tune={}), _results(tmp_path)
    run = grid.first_runs()[0]
    assert run.config()["training"]["evaluate_every"] == 2
    lines = [{"step": step, "loss": loss} for step, loss in ((0, 1.0), (2, 3.0), (10, float("nan")))]
    results.add(run, lines, None)
    (cell,) = figures(grid, _results(tmp_path))
    assert cell["mean"] == 3.0, "not that of step 0"
    assert results.of(run).counted(least=False) == float("inf")  # type: ignore[union-attr]


def test_differences_are_taken_seed_by_seed() -> None:
    """The seeds differ more than the rows do."""
    cells = [
        {"row": "dense", "column": "a", "by_seed": [2.0, 3.0]},
        {"row": "half", "column": "a", "by_seed": [2.5, 3.4]},
        {"row": "half", "column": "b", "by_seed": [2.1, 3.3]},
    ]
    (found,) = differences_from(["dense"], cells)
    assert (found["row"], found["column"], found["less"], found["seeds"]) == ("half", "a", "dense", 2)
    assert found["mean"] == pytest.approx(0.45) and found["spread"] == pytest.approx(0.1 / 2**0.5)


def test_a_grid_goes_on_from_its_file(tmp_path: Path) -> None:
    trained: list[str] = []

    def train(run: GridRun, config: Path, folder: Path) -> tuple[list[dict[str, Any]], float | None]:
        assert load_config(config).training.seed == run.seed
        trained.append(run.name)
        if run.column == "H = 5" and len(trained) < 6:
            raise RuntimeError("no memory")
        return [{"step": 10, "loss": 2.5}], 90.0

    grid = _grid(tmp_path, tune={}, seeds=1)
    failed = list(run_all(grid.first_runs(), tmp_path, None, _results(tmp_path), 1, train))
    assert len(trained) == 3 and failed == ["half-H_5-seed0: no memory"]
    changed = _grid(tmp_path, tune={}, seeds=1, rows=GRID["rows"] | {"dense": {"optimizer.params.lr": 0.2}})
    trained += ["", "", ""]
    assert not list(run_all(changed.first_runs(), tmp_path, None, _results(tmp_path), 1, train))
    assert trained[6:] == ["dense-every_step-seed0", "half-H_5-seed0"], "what changed, and what failed"
    with pytest.raises(ConfigError, match="learned from another corpus"):
        _results(tmp_path, "y")


def test_a_cell_may_try_more_values_than_others(tmp_path: Path) -> None:
    grid, results = _grid(tmp_path, also_try={"half": {"H = 5": {"optimizer.params.lr": [0.4]}}}), _results(tmp_path)
    tried = [(run.row, run.column, run.choice["optimizer.params.lr"]) for run in grid.first_runs()]
    assert len(tried) == 3 * 2 + 1 and tried[-1] == ("half", "H = 5", 0.4)
    losses = {("half", "H = 5", rate, 0): loss for rate, loss in ((0.1, 3.0), (0.2, 2.5), (0.4, 2.0))}
    _note(grid, results, {**losses, ("half", "every step", 0.1, 0): 2.5, ("half", "every step", 0.2, 0): 2.0})
    assert best_choice(grid, ("half", "H = 5"), results) == {"optimizer.params.lr": 0.4}
    assert best_choice(grid, ("half", "every step"), results) == {"optimizer.params.lr": 0.2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {"dense": {"sdp.capaciti": 1}}, "skip": []}, "dense, every step: sdp.capaciti"),
        ({"skip": [["dense", "H = 6"]]}, "is not a pair of a row and a column"),
        ({"also_try": {"dense": {"H = 5": {"optimizer.params.lr": [1]}}}}, "dense, H = 5 is no cell that this grid"),
        ({"also_try": {"half": {"H = 5": {"optimizer.params.lr": [0.2]}}}}, "half, H = 5: tries"),
        ({"also_try": {"half": {"H = 5": {"lr": [1]}}}}, "half, H = 5 needs values for each key of tune"),
        ({"columns": {}}, "columns"),
        ({"compare_with": ["dance"]}, "dance is not a row"),
        ({"rows": {"half": {}, "half!": {}, "half?": {}, "dense": {}}}, "rename one"),
        ({"simulate": True}, r"half, H = 5: sdp.sync: the simulator does not follow this key"),
    ],
)
def test_mistakes_name_the_file_and_the_cell(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"grid\.json") as caught:
        _grid(tmp_path, **change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_simulates_a_grid(tmp_path: Path) -> None:
    base = GRID["base"] | {"training": {"steps": 2}, "data": {"sequence_length": 8, "path": str(tmp_path / "corpus")}}
    rows = {"dense": {"sdp.capacity": 1.0}, "half": {"sdp.capacity": 0.5}}
    path = tmp_path / "small.json"
    changes = {"simulate": True, "seeds": 1, "base": base, "rows": rows, "columns": {"a": {}}, "skip": [], "tune": {}}
    path.write_text(json.dumps(GRID | changes))
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("one thing follows from another, and then\n" * (30 + number))
    prepare([str(tmp_path / "*.txt")], tmp_path / "corpus", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    command = [sys.executable, "-m", "lab.grid", str(path), str(tmp_path / "out"), "--jobs", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "| half | 5." in ended.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.stdout == ended.stdout and again.stderr == "", "nothing is repeated"


def _committed() -> Iterator[Any]:
    for path in sorted(STUDIES.glob("*/grid*.json")):
        yield pytest.param(path, id=f"{path.parent.name}/{path.stem}")


@pytest.mark.parametrize("path", list(_committed()))
def test_a_committed_grid_is_valid_and_its_results_are_those_of_its_runs(path: Path) -> None:
    grid = read_grid(path)
    file = path.with_name(path.name.replace("grid", "results"))
    content = json.loads(file.read_text()) if file.exists() else {}
    runs = content["results"].get("runs", {}) if "results" in content and "cells" in content else {}
    key = "least" if grid.early_stopping else "loss"
    compared = losses = 0
    for cell in content.get("cells", ()) if runs else ():
        losses += cell["seeds"]
        for seed, loss in enumerate(cell["by_seed"]):
            run = GridRun(grid, cell["row"], cell["column"], cell["tuned"], seed)
            if loss is not None and run.name in runs:
                assert runs[run.name][key] == pytest.approx(loss), run.name
                compared += 1
    assert compared >= min(len(runs), losses, 11)
    if "differences" in content:
        expected = differences_from(grid.compare_with, content["cells"])
        assert len(content["differences"]) == len(expected) > 0
        for ours, theirs in zip(content["differences"], expected, strict=True):
            assert ours == pytest.approx(theirs), ours


def test_the_memory_of_each_cell_is_that_of_a_plan(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("one thing follows from another, and then\n" * (30 + number))
    corpus = tmp_path / "corpus"
    prepare([str(tmp_path / "*.txt")], corpus, tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    base = GRID["base"] | {"data": GRID["base"]["data"] | {"path": str(corpus)}}
    grid = _grid(tmp_path, base=base, skip=[], columns={"every step": {}})
    found = {row: (state, peak) for row, _, state, peak in peaks(grid, tmp_path)}
    for row, measured in found.items():
        config = load_config(GridRun(grid, row, "every step", grid.choices(row, "every step")[0], 0).config(corpus))
        trace = forecast(row, config, Machine((2,), 1.0, 1.0, 1.0, 1.0), 2).worst.trace
        assert measured[0] == trace.state.parameters + trace.state.gradients + trace.state.optimizer
        assert measured[1] == pytest.approx(trace.peak, rel=0.01)
    assert found["half"] < found["dense"]
