"""``sdp evaluate DIR --tasks``: the scores of lm-evaluation-harness on an export of the run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.harness_tasks import write_tasks
from sdp.tests.support.small_runs import run_sdp, tiny_config, write_config
from sdp.tools.cli import main

NEEDED = {"lm_eval": "lm-eval", "accelerate": "accelerate", "transformers": "transformers"}
MISSING = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: pip install 'sdp-engine[eval]'")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (OFFLINE | {"HF_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)


def run_harness(model: Path, names: list[str], folder: Path) -> dict[str, dict]:
    command = [
        *(sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "2"),
        *("--model_args", f"pretrained={model},dtype=float32", "--tasks", ",".join(names)),
        *("--include_path", str(folder / "tasks"), "--output_path", str(folder / "scores")),
    ]
    finished = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(next((folder / "scores").rglob("results_*.json")).read_text())["results"]


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@installed
@pytest.mark.usefixtures("offline")
def test_scores_are_those_of_the_harness_on_an_export(
    text_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_tasks(tmp_path / "tasks")
    config = tiny_config(text_corpus, groups=2, steps=4)
    config["sdp"]["capacity"] = 0.5
    config["model"] |= {"max_position_embeddings": 64, "initializer_range": 0.1}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02}}
    config["training"] |= {"save_every": 4}
    finished = run_sdp("train", write_config(config, tmp_path), "--dump-dir", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    theirs = run_harness(tmp_path / "model", names, tmp_path)
    options = ["--tasks", ",".join(names), "--include-path", str(tmp_path / "tasks")]
    result = evaluated(capsys, tmp_path / "run", *options)
    ours, compared = result["tasks"], 0
    for task in names:
        for key, value in theirs[task].items():
            measure, _, filtered = key.partition(",")
            if filtered == "none" and not measure.endswith("_stderr"):
                assert ours[task][measure] == pytest.approx(value, rel=1e-4), key
                compared += 1
    assert compared == 6
    assert {task: scores["samples"] for task, scores in ours.items()} == dict.fromkeys(names, 5)
    assert evaluated(capsys, tmp_path / "run")["loss"] == result["loss"]
    one = [*options[2:], "--tasks", "own_choice", "--limit", "2", "--num-fewshot", "1"]
    assert evaluated(capsys, tmp_path / "run", *one)["tasks"]["own_choice"]["samples"] == 2


@installed
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "own_choise"], "--tasks: unknown task own_choise, did you mean own_choice?"),
        (["--tasks", "own_choice", "--include-path", "nowhere"], "--include-path: nowhere is not a directory"),
        (["--tasks", ","], "--tasks: no task is named"),
        (["--tasks", "own_choice", "--limit", "0"], "--limit 0: give 1 or more"),
        (["--tasks", "own_text"], "--tasks: own_text cannot be loaded"),
        (["--tasks", "own_choice"], "--tasks: own_choice cannot be loaded"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks")
    (tmp_path / "tasks/own_text.jsonl").unlink()
    file = tmp_path / "tasks/own_choice.yaml"
    file.write_text(file.read_text().replace("{{choices}}", "{{nothing}}"))
    options = options if "--include-path" in options else [*options, "--include-path", str(tmp_path / "tasks")]
    assert main(["evaluate", str(tmp_path), *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"sdp: error: {message}")


def test_a_missing_package_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else found(name, *more)
    )
    assert main(["evaluate", str(tmp_path), "--tasks", "hellaswag"]) == 2
    assert "the package lm-eval is not installed; pip install 'sdp-engine[eval]'" in capsys.readouterr().err


def test_options_of_tasks_need_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "--limit", "3"]) == 2
    assert "are for tasks; name some with --tasks" in capsys.readouterr().err
