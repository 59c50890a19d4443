"""``sdp study grid``: which runs a grid has, how values are tuned, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tools.study.grid import best_choice, figures, later_runs, report
from sdp.tools.study.grid_file import first_runs, read_grid

ROOT = Path(__file__).parents[3]

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
        "sdp": {"groups": 2, "engine": "reference"},
    },
    "rows": {"dense": {}, "half": {"sdp.capacity": 0.5}},
    "columns": {"every step": {}, "H = 5": {"sdp.sync": {"every": 5}}},
    "skip": [["dense", "H = 5"]],
    "tune": {"optimizer.params.lr": [0.1, 0.2]},
}  # fmt: skip


def _write(grid: dict[str, Any], folder: Path) -> Path:
    path = folder / "grid.json"
    path.write_text(json.dumps(grid), encoding="utf-8")
    return path


def _pretend(out: Path, name: str, loss: float, seconds: float | None = None) -> None:
    """Write the files of a finished run with this loss, which took ``seconds``."""
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GRID["base"]), encoding="utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "loss": loss}) + "\n", encoding="utf-8")
    evaluation = {"step": 10, "loss": loss, "seconds": 7.0}  # of the evaluation
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n", encoding="utf-8")
    summary = {} if seconds is None else {"seconds": seconds}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def test_a_cell_is_the_base_with_the_settings_of_row_and_column(tmp_path: Path) -> None:
    grid = read_grid(_write(GRID, tmp_path))
    assert grid.cells() == [("dense", "every step"), ("half", "every step"), ("half", "H = 5")]
    runs = first_runs(grid)
    assert [run.name for run in runs[-2:]] == ["half-H_5-lr0.1-seed0", "half-H_5-lr0.2-seed0"]
    config = load_config(runs[-1].config(tmp_path))
    assert config.sdp.capacity == 0.5 and config.sdp.sync is not None and config.sdp.sync.every == 5
    assert config.optimizer.params["lr"] == 0.2 and config.data.path == str(tmp_path)
    assert GRID["base"] == grid.base, "cells share the base"


def test_other_seeds_have_the_value_with_the_lowest_loss(tmp_path: Path) -> None:
    grid, out = read_grid(_write(GRID, tmp_path)), tmp_path / "out"
    for name, loss in (("dense-every_step-lr0.1", 3.0), ("dense-every_step-lr0.2", 2.0), ("half-H_5-lr0.1", 4.0)):
        _pretend(out, f"{name}-seed0", loss)
    assert best_choice(grid, ("dense", "every step"), out) == {"optimizer.params.lr": 0.2}
    assert [run.name for run in later_runs(grid, out)] == ["dense-every_step-lr0.2-seed1", "half-H_5-lr0.1-seed1"]
    _pretend(out, "dense-every_step-lr0.2-seed1", 2.5)
    first, second = figures(grid, out)
    assert (first["mean"], first["seeds"], first["steps"]) == (2.25, 2, 10)
    assert first["spread"] == pytest.approx(0.5 / 2**0.5)
    assert (second["row"], second["column"], second["spread"]) == ("half", "H = 5", None)
    text = report(grid, out)
    assert "| dense | 2.2500 ± 0.3536 (lr 0.2) | – |" in text
    assert "| half | – | 4.0000 (lr 0.1, 1 of 2 seeds) |" in text
    assert json.loads((out / "grid.json").read_text())["cells"] == [first, second]
    assert (out / "grid.png").stat().st_size > 0


def test_values_are_compared_over_as_many_seeds_as_the_grid_says(tmp_path: Path) -> None:
    """The first seed alone would choose 0.1. The second one is only half done for "half"."""
    grid, out = read_grid(_write(GRID | {"tune_seeds": 2, "seeds": 3}, tmp_path)), tmp_path / "out"
    assert [run.name for run in first_runs(grid)[6:8]] == [
        "dense-every_step-lr0.1-seed1",
        "dense-every_step-lr0.2-seed1",
    ]
    for rate, by_seed in ((0.1, (2.0, 4.0)), (0.2, (2.5, 2.7))):
        for seed, loss in enumerate(by_seed):
            _pretend(out, f"dense-every_step-lr{rate}-seed{seed}", loss)
    for rate, seed, loss in ((0.1, 0, 2.0), (0.2, 0, 3.0), (0.2, 1, 3.0)):
        _pretend(out, f"half-every_step-lr{rate}-seed{seed}", loss)
    assert best_choice(grid, ("dense", "every step"), out) == {"optimizer.params.lr": 0.2}
    assert best_choice(grid, ("half", "every step"), out) == {"optimizer.params.lr": 0.2}
    assert best_choice(grid, ("half", "H = 5"), out) is None
    assert [run.name for run in later_runs(grid, out)] == [
        "dense-every_step-lr0.2-seed2",
        "half-every_step-lr0.2-seed2",
    ]


def test_the_report_says_how_long_its_runs_took(tmp_path: Path) -> None:
    grid, out = read_grid(_write(GRID, tmp_path)), tmp_path / "out"
    for rate, seconds in ((0.1, 1800.0), (0.2, 5400.0)):
        _pretend(out, f"dense-every_step-lr{rate}-seed0", 2.0, seconds)
    _pretend(out, "half-every_step-lr0.1-seed0", 2.0)
    assert "2 runs trained for 2.0 hours together" in report(grid, out)
    assert json.loads((out / "grid.json").read_text())["training_time"] == {"runs": 2, "hours": 2.0}


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    """The seeds differ more than the rows do."""
    grid, out = (
        read_grid(_write(GRID | {"tune": {}, "compare_with": ["dense"], "skip": []}, tmp_path)),
        tmp_path / "out",
    )
    losses = {
        "dense-every_step": (2.0, 3.0),
        "half-every_step": (2.5, 3.4),
        "half-H_5": (2.1, 3.3),
        "dense-H_5": (2.0,),
    }
    for name, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            _pretend(out, f"{name}-seed{seed}", loss)
    text = report(grid, out)
    assert "| less dense | every step | H = 5 |\n|---|---|---|\n| half | +0.4500 ± 0.0707 | +0.1000 |" in text
    near, far = json.loads((out / "grid.json").read_text())["differences"]
    assert (near["row"], near["column"], near["less"], near["seeds"]) == ("half", "every step", "dense", 2)
    assert near["mean"] == pytest.approx(0.45) and near["spread"] == pytest.approx(0.1 / 2**0.5)
    assert (far["seeds"], far["spread"]) == (1, None) and far["mean"] == pytest.approx(0.1)


def test_a_comparison_with_an_unknown_row_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compare_with: dance is not a row of this grid"):
        read_grid(_write(GRID | {"compare_with": ["dance"]}, tmp_path))


def test_with_early_stopping_the_lowest_loss_of_a_run_counts(tmp_path: Path) -> None:
    grid, out = read_grid(_write(GRID | {"early_stopping": 5}, tmp_path)), tmp_path / "out"
    assert first_runs(grid)[0].config(None)["training"]["evaluate_every"] == 2
    for rate, losses in ((0.1, (9.0, 3.0, 4.0)), (0.2, (1.0, 3.5, 3.6))):
        _pretend(out, f"dense-every_step-lr{rate}-seed0", losses[-1])
        lines = [json.dumps({"step": 5 * number, "loss": loss}) + "\n" for number, loss in enumerate(losses)]
        (out / f"dense-every_step-lr{rate}-seed0" / "evaluations.jsonl").write_text("".join(lines))
    assert best_choice(grid, ("dense", "every step"), out) == {"optimizer.params.lr": 0.1}, "not that of step 0"
    assert figures(grid, out)[0]["mean"] == 3.0
    assert report(grid, out).startswith("Rates: lowest held-out loss of a run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {"dense": {"sdp.capaciti": 1}}, "skip": []}, "dense, every step: sdp.capaciti"),
        ({"skip": [["dense", "H = 6"]]}, "is not a pair of a row and a column"),
        ({"columns": {}}, "columns"),
        ({"rows": {"dense": {"seed.of": 1}}, "base": GRID["base"] | {"seed": 1}, "skip": []}, "seed is not a section"),
        ({"titel": "x"}, "titel"),
    ],
)
def test_mistakes_name_the_file_and_the_cell(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _write(GRID | change, tmp_path)
    with pytest.raises(ConfigError, match=r"grid\.json") as caught:
        read_grid(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_committed_grids_are_valid() -> None:
    grids = sorted((ROOT / "configs/studies").glob("*.json"))
    assert grids
    for path in grids:
        assert read_grid(path).cells()
