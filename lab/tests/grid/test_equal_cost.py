"""Rows of a grid at equal operations, and at equal seconds over a link."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.errors import ConfigError

from lab.grid.equal_cost import OPERATIONS, EqualCost, compare, comparison_tables, loss_after, step_costs
from lab.grid.grid_file import read_grid

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
    "data": {"sequence_length": 8, "tokenizer": "bytes"},
    "training": {"steps": 10},
    "sdp": {"groups": 2, "check_interval": 0},
}  # fmt: skip
WANTED = EqualCost(reference="dense", device="1TFLOP/s", links=["100Mbit/s", "1Gbit/s"])


def _costs(**sdp: Any) -> dict[str, float]:
    return step_costs(CONFIG | {"sdp": CONFIG["sdp"] | sdp}, WANTED)


def _cell(steps: int, *by_seed: float | None) -> dict[str, Any]:
    """Figures of a cell with these losses."""
    return {"steps": steps, "mean": statistics.mean(filter(None, by_seed)), "by_seed": list(by_seed)}


def test_the_cost_of_a_step_is_that_of_the_plan() -> None:
    dense, half = _costs(), _costs(capacity=0.5, masking="forward")
    assert half[OPERATIONS] < dense[OPERATIONS]
    parameters = 2 * 257 * 16 + 16 + 4 * (4 * 16 * 16 + 3 * 16 * 16 + 2 * 16)
    sent = 4 * parameters  # a ring all-reduce between two ranks sends each gradient once
    seconds = sent / (100e6 / 8)
    assert dense["100Mbit/s"] == pytest.approx(seconds, rel=1e-3), "computation hides nothing at this link's speed"
    assert dense["100Mbit/s"] / dense["1Gbit/s"] == pytest.approx(10, rel=1e-2)


def test_a_schedule_of_maskings_costs_the_mean_of_its_phases() -> None:
    phases = [{"until": 0.2, "masking": "forward"}, {"masking": "backward"}]
    forward, backward = _costs(capacity=0.5, masking="forward"), _costs(capacity=0.5, masking="backward")
    scheduled = _costs(capacity=0.5, masking=phases)
    for measure in scheduled:
        assert scheduled[measure] == pytest.approx(0.2 * forward[measure] + 0.8 * backward[measure])
    assert forward[OPERATIONS] < scheduled[OPERATIONS] < backward[OPERATIONS]


def test_loss_is_interpolated_over_the_logarithm_of_steps_and_never_extrapolated() -> None:
    cells = [_cell(100, 3.0), _cell(400, 2.0), _cell(1600, 1.8)]
    for steps, loss in ((200, 2.5), (800, 1.9), (100, 3.0), (1600, 1.8)):
        assert loss_after(cells, steps) == (pytest.approx(loss), None)
    assert loss_after(cells, 99) is None and loss_after(cells, 1601) is None
    assert loss_after(cells[:1], 101) is None, "one length says nothing of others"


def test_the_deviation_is_that_of_the_seeds_that_have_both_lengths() -> None:
    cells = [_cell(100, 3.0, 3.2, 2.8), _cell(400, 2.0, 2.6, None)]
    mean = (3.0 + 2.3) / 2
    assert loss_after(cells, 200) == (pytest.approx(mean), pytest.approx((2.9 - 2.5) / 2**0.5))
    cells = [_cell(100, 3.0, 3.2), _cell(400, 2.0, None)]
    assert loss_after(cells, 200) == (pytest.approx(2.55), None)
    assert loss_after(cells, 100) == (pytest.approx(3.1), pytest.approx(0.2 / 2**0.5)), "a length that was trained"


def test_a_row_with_cheaper_steps_makes_more_of_them() -> None:
    found = [
        {"row": row, "column": column, **_cell(steps, loss - 0.1, loss + 0.1)}
        for row, losses in {"dense": (3.0, 2.0), "half": (3.2, 2.4)}.items()
        for column, steps, loss in zip(("short", "long"), (100, 400), losses, strict=True)
    ]
    costs = {
        "dense": {OPERATIONS: 2.0, "100Mbit/s": 2.0, "1Gbit/s": 1.0},
        "half": {OPERATIONS: 1.0, "100Mbit/s": 0.5, "1Gbit/s": 1.0},
    }
    compared = {(one.measure, one.column, one.row): one for one in compare(found, costs, WANTED)}
    short = compared[OPERATIONS, "short", "half"]
    assert short.steps == 200 and short.loss == pytest.approx(2.8)
    assert compared["100Mbit/s", "short", "half"].loss == pytest.approx(2.4)
    assert compared["100Mbit/s", "long", "half"].loss is None
    assert compared["1Gbit/s", "long", "half"].loss == pytest.approx(2.4)
    assert all(one.loss is not None for (_, _, row), one in compared.items() if row == "dense")
    text = comparison_tables(list(compared.values()), WANTED)
    assert "| half | 2.8000 ± 0.1414 (200) | not trained so long (800) |" in text and "seconds over 1Gbit/s" in text


def test_columns_of_a_comparison_are_lengths_of_training(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    columns = {"few": {"training.steps": 4}, "many": {"sdp.groups": 8}}
    grid = {"title": "Workers", "base": CONFIG, "rows": {"dense": {}}, "columns": columns}
    path.write_text(json.dumps(grid | {"equal_cost": WANTED.model_dump()}))
    with pytest.raises(ConfigError, match=r"column many has sdp\.groups, which changes more than the length"):
        read_grid(path)


def test_a_run_that_diverged_is_not_interpolated_into_a_number() -> None:
    cells = [_cell(100, 3.0, 3.2), _cell(400, 2.0, math.inf)]
    assert loss_after(cells, 200) == (math.inf, None)
    assert loss_after(cells, 100) == (pytest.approx(3.1), pytest.approx(0.2 / 2**0.5))
    diverged = [_cell(100, math.inf, math.inf), _cell(400, math.inf, math.inf), _cell(800, 2.0, 2.0)]
    assert loss_after(diverged, 200) == loss_after(diverged, 600) == (math.inf, None)
