"""Misspelt keys in the sections whose keys depend on a name, before a process starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.small_runs import write_config
from sdp.tools.cli import main

MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GOOD: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}},
    "model": {"name": "llama", **MODEL},
    "data": {"path": "nowhere", "sequence_length": 32},
}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.params.wieght_decay=0.1", "optimizer.params.wieght_decay: unknown key, did you mean weight_decay?"),
        ("optimizer.params.lr=-1", "optimizer.params.lr: input should be greater than or equal to 0 (found -1)"),
        ("optimizer.type=AdmW", 'optimizer.type: unknown optimizer "AdmW", did you mean AdamW?'),
        ("optimizer.type=OneBitAdam", 'optimizer.type: "OneBitAdam" cannot be honoured: '),
        ("optimizer.type=\x1b[2J", 'optimizer.type: unknown optimizer "\\x1b[2J"; known: AdamW, '),
        ("scheduler.params.warmup_nun_steps=3", "scheduler.params.warmup_nun_steps: unknown key, did you mean "),
        ("scheduler.type=Warmup", 'scheduler.type: unknown schedule "Warmup", did you mean WarmupLR?'),
        ("scheduler.params.warmup_type=cubic", "scheduler.params.warmup_type: "),
        ("model.hiden_size=8", "model.hiden_size: unknown key, did you mean hidden_size?"),
        ("model.hidden_size=wide", "model.hidden_size: "),
        ("model.name=lama", 'model.name: unknown model "lama", did you mean llama?'),
        ("model.name=null", "model.name: this key is required; known: llama, resnet18, swin_t"),
        ("model.name=[1]", "model.name: unknown model"),
    ],
)
def test_a_misspelt_key_of_a_named_section_is_one_line(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_config(GOOD, tmp_path))
    launch = ["launch", "--launcher", "slurm", "--gpus-per-node", "2", "--dry-run", path]
    train = ["train", path, "--nproc", "2", "--dump-dir", str(tmp_path / "run")]
    for words in (["config", path], launch, train):
        assert main([*words, "--set", setting]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"sdp: error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": {}},
        {"optimizer": None, "scheduler": None},
        {"training": {"init_from": "x"}, "model": {"name": "llama"}},
    ],
    ids=str,
)
def test_sections_that_something_else_completes_are_taken(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(write_config(GOOD | change, tmp_path))]) == 0
    assert json.loads(capsys.readouterr().out)["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("data", {"path": "a\0b"}),
        ("data", {"path": None, "sources": [{"path": "a\0b", "weight": 1}]}),
        ("training", {"init_from": "a\0b"}),
    ],
)
def test_a_path_with_nul_is_one_line(
    section: str, value: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system takes no such name, and Python says so in a traceback."""
    path = write_config(GOOD | {section: GOOD.get(section, {}) | value}, tmp_path)
    assert main(["config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "a path cannot have the character NUL; remove it" in error and error.count("\n") == 1
