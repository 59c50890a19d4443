"""Runs that measure gradient noise, and runs whose holders follow from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.small_runs import read_losses, read_metrics, run_sdp, write_config
from sdp.tools.cli import main


def train(config: dict[str, Any], tmp_path: Path, name: str, *words: str) -> int:
    path = write_config(config, tmp_path)
    return main(["train", str(path), "--dump-dir", str(tmp_path / name), *words])


def settings(config: dict[str, Any], **sdp: Any) -> dict[str, Any]:
    changed = {**config, "scheduler": None, "sdp": {"groups": 4, "engine": "reference", **sdp}}
    return changed | {"training": {"steps": 6, "evaluate_batches": 1, "save_every": 3}}


def test_holders_follow_from_a_short_run_and_a_resume_does_not_need_it(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring = settings(config, capacity=1.0)
    measuring["training"] |= {"noise_scale_interval": 2, "save_every": 0}
    assert train(measuring, tmp_path, "measure") == 0
    lines = read_metrics(tmp_path / "measure")
    assert ["noise" in line for line in lines] == [False, True] * 3
    units = json.loads((tmp_path / "measure/placement.json").read_text())["units"]
    assert all(set(line["noise"]) == {*units, "shared"} for line in lines[1::2])
    assert "gradient noise scale, samples" in capsys.readouterr().out
    curves = [path.name for path in (tmp_path / "measure" / "csv").rglob("*.csv")]
    assert "Train_noise_scale.csv" in curves

    ours = settings(config, capacity=0.5, profile={"noise": str(tmp_path / "measure"), "preconditioned": True})
    assert train(ours, tmp_path, "whole") == 0
    profile = json.loads((tmp_path / "whole/config.json").read_text())["sdp"]["profile"]
    holders = json.loads((tmp_path / "whole/placement.json").read_text())["holders"]
    assert profile["holders"] == [len(of) for of in holders]
    assert sum(profile["holders"]) == 8

    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half/checkpoints/step-6")
    shutil.rmtree(tmp_path / "measure")
    assert train(ours, tmp_path, "half", "--resume") == 0
    assert json.loads((tmp_path / "half/placement.json").read_text())["holders"] == holders
    assert json.loads((tmp_path / "half/config.json").read_text())["sdp"]["profile"] == profile
    assert read_losses(tmp_path / "half") == read_losses(tmp_path / "whole")
    # Another capacity needs other holders, and so the file.
    assert train(ours, tmp_path, "half", "--resume", "--set", "sdp.capacity=0.75", "training.steps=7") == 2
    assert "sdp.profile.noise: " in capsys.readouterr().err


def test_a_run_of_two_processes_sends_what_is_planned(config: dict[str, Any], tmp_path: Path) -> None:
    config["training"] |= {"noise_scale_interval": 3, "save_every": 0}
    finished = run_sdp("train", write_config(config, tmp_path), "--dump-dir", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    assert ["noise" in line for line in read_metrics(tmp_path / "run")] == [False, False, True] * 2
    for rank in json.loads((tmp_path / "run/summary.json").read_text())["ranks"]:
        assert rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]
        assert rank["state_measured"] == rank["state_predicted"]


def test_the_report_plots_noise(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measuring = settings(config, capacity=1.0)
    measuring["training"] |= {"noise_scale_interval": 3, "save_every": 0}
    assert train(measuring, tmp_path, "one") == 0
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    plot = tmp_path / "plots/noise.png"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "other"), "--noise-plot", str(plot)]) == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert f"plot of the gradient noise: {plot}" in capsys.readouterr().out
    lines = [
        {key: value for key, value in line.items() if "noise" not in key} for line in read_metrics(tmp_path / "one")
    ]
    (tmp_path / "one/metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["report", str(tmp_path / "one"), "--noise-plot", str(plot)]) == 2
    assert "no step has measured noise" in capsys.readouterr().err
