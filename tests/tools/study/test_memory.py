"""The table of planned and measured memory: tiny models of each kind agree, and a plan that is
wrong is said to be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.tools.cli import main
from sdp.tools.shared.variants import Variant, variants
from sdp.tools.study.memory import COLUMNS, TOLERANCE, Task, deviation, measure, report

TINY = {
    "resnet18": Task({"name": "resnet18", "stem": "cifar", "width": 8, "num_classes": 10, "image_size": 16}, 4, 16, 4),
    "swin_t": Task(
        {
            "name": "swin_t", "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
            "num_classes": 10, "image_size": 32
        },
        2, 32, 2,
    ),
    "llama": Task(
        {"name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
            "num_attention_heads": 4},
        4, 64, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        pytest.param("resnet18", Variant(0.5, "neuron", "backward"), marks=pytest.mark.slow),
        ("swin_t", Variant(0.5, "neuron", "forward")),
        ("llama", Variant(0.5, "block", "backward")),
        ("llama", Variant(1.0)),
    ],
)
def test_a_real_step_needs_what_was_planned(model: str, variant: Variant) -> None:
    row = measure(TINY[model], variant)
    assert row["placement"] == "balanced"
    assert all(row["planned"][column] > 0 for column in COLUMNS if column != "frozen")
    assert (row["planned"]["frozen"] > 0) == (variant.masking == "backward")
    assert max(abs(deviation(row, column)) for column in COLUMNS) <= TOLERANCE
    text, within = report({model: {variant.name: row}})
    assert within
    assert text.splitlines()[-1].startswith("1 rows measured, 0 without figures; largest deviation ")
    row["measured"]["frozen"] = int(1.04 * row["measured"]["frozen"]) + 1
    text, within = report({model: {variant.name: row}})
    assert not within
    assert text.endswith(f"(frozen of {model}, {variant.name}): NOT within 3%")


def test_blocks_that_balance_nowhere_are_placed_cyclically_and_a_refusal_is_a_row() -> None:
    task = TINY["resnet18"]
    assert measure(task, Variant(0.5, "block", "forward"))["placement"] == "cyclic"
    refused = measure(task, Variant(0.1, "neuron", "forward"))
    assert set(refused) == {"error"}
    text, within = report({"resnet18": {"0.1 neuron forward": refused}})
    assert refused["error"] in text
    assert text.endswith("Nothing was measured.")
    assert not within


def test_finished_rows_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures: dict[str, int] = dict.fromkeys(COLUMNS, 1_000_000)
    rows: dict[str, Any] = {
        "llama_134m": {one.name: _row(figures) for one in variants([0.5, 1.0], ["block"], ["forward", "backward"])}
    }
    (tmp_path / "memory.json").write_text(json.dumps(rows))
    words = [
        "study",
        "memory",
        str(tmp_path),
        "--model",
        "llama_134m",
        "--capacity",
        "0.5",
        "1",
        "--granularity",
        "block",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("1.00 / 1.00 (1.000)") == 3 * len(COLUMNS)
    assert printed == (tmp_path / "memory.md").read_text()
    rows["llama_134m"]["1 dense"] = _row(figures | {"gradients": 1_031_000})
    (tmp_path / "memory.json").write_text(json.dumps(rows))
    assert main(words) == 1
    assert capsys.readouterr().out.endswith(
        "largest deviation +3.10% (gradients of llama_134m, 1 dense): NOT within 3%\n"
    )


def _row(measured: dict[str, int]) -> dict[str, Any]:
    return {"placement": "balanced", "planned": dict.fromkeys(COLUMNS, 1_000_000), "measured": measured}
