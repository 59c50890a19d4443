"""Absurd sizes are refused at once, with one line that says the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sdp.tools.cli import main

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "sdp": {"groups": 2, "capacity": 0.5},
    "model": {
        "name": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "data": {"sequence_length": 32},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "model.hidden_size=1000000000000"], "less than or equal to 16777216"),
        (["--set", "model.num_hidden_layers=1000000000"], "less than or equal to 65536"),
        (["--set", "model.vocab_size=1000000000000"], "less than or equal to 16777216"),
        (["--set", f"sdp.groups={10**18}"], "less than or equal to 1048576"),
        (["--set", f"tensor_parallel.autotp_size={10**18}"], "less than or equal to 1048576"),
        (["--set", f"train_batch_size={10**30}"], "less than or equal to 4294967296"),
        (["--set", f"train_micro_batch_size_per_gpu={10**30}"], "less than or equal to 4294967296"),
        (["--set", "train_micro_batch_size_per_gpu=1000000000"], "a forward pass of at most 67,108,864 is planned"),
        (["--set", "sdp.groups=1048576", "tensor_parallel.autotp_size=4"], "planner takes up to 1,048,576"),
        (["--world", str(10**20)], "is too large; the most is 1,048,576"),
        (["--gpus-per-node", str(10**20)], "is too large; the most is 1,048,576"),
        (["--device-memory=-1GB"], "--device-memory -1GB: expected"),
        (["--device-memory", "-1GB"], "--device-memory"),
        (["--html", ""], '--html "": expected the name of a file'),
    ],
)
def test_plan_refuses(config: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [["--nproc", str(10**20)], ["--rounds", str(10**20)], ["--steps", str(10**20)]])
def test_methods_refuse(config: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["bench", str(config), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
