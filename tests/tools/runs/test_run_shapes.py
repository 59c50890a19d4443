"""Files of a run whose values have wrong types are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.errors import CheckpointError, DataError
from sdp.tests.support.fabricated_runs import make_run
from sdp.tools.cli import main
from sdp.tools.evaluate import Evaluation, as_json
from sdp.tools.runs.plot import plot_loss
from sdp.tools.runs.run_files import read_run
from sdp.tools.runs.saved_run import check_data

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"model": 3}),
    ("config.json", {"model": {"name": []}}),
    ("config.json", {"sdp": []}),
    ("config.json", {"training": {"steps": "many"}}),
    ("placement.json", {"holders": "x"}),
    ("placement.json", {"costs": [1.5] * 8}),
    ("placement.json", {"costs": [1]}),
    ("placement.json", {"costs": [-1] * 8}),
    ("placement.json", {"groups": 10**30}),
    ("placement.json", {"holders": [[9]] * 8}),
    ("summary.json", {"ranks": {"a": 1}}),
    ("summary.json", {"ranks": [None]}),
    ("summary.json", {"ranks": [{"peak_memory_bytes": 1, "baseline_memory_bytes": "x"}]}),
    ("summary.json", {"ranks": [{"state_measured": []}]}),
    ("summary.json", {"model": 1.5}),
    ("summary.json", {"model": {"name": "llama"}}),
    ("summary.json", {"layout": []}),
    ("summary.json", {"held_out": "x"}),
    ("summary.json", {"dense_state_bytes": {"parameters": 1e308}}),
    ("summary.json", {"tokens": [1]}),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=str)
def test_a_wrong_value_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: dict[str, Any]
) -> None:
    make_run(tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | change))
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"sdp: error: {tmp_path / name}: damaged, or of another version: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "x"},
        {"loss": [1.0]},
        {"tokens": -1},
        {"subnetwork_losses": "abc"},
        {"comm_bytes_by_kind": [1]},
        {"step": -1},
    ],
    ids=str,
)
def test_a_wrong_value_in_a_line_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    make_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: not a line of a run \('.*remove it"):
        read_run(tmp_path)


def test_a_line_without_tokens_or_loss_can_be_plotted(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 10, "loss": 3.0}\n')
    assert plot_loss([read_run(tmp_path)], tmp_path / "loss.png").is_file()


def test_a_loss_that_is_nan_is_null_in_the_json_of_an_evaluation() -> None:
    result = Evaluation("c", 1, "d", 1, 1, 1, float("nan"), float("inf"), None, None)
    assert json.loads(as_json(result), parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize(
    "client_state",
    [{"images": 5}, {"images": {}}, {"images": {"name": "digits"}}, {"tokenizer": 5}, {"tokenizer": ["kind"]}],
    ids=str,
)
def test_a_client_state_that_does_not_describe_the_data_is_refused(
    tmp_path: Path, client_state: dict[str, Any]
) -> None:
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-4: damaged, its client state does not describe the data"):
        check_data(Path("step-4"), {"client_state": client_state}, tmp_path, "digits")
