"""sdp train with a service: the launcher starts everything, and a killed group comes back."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sdp.data.prepare import prepare
from sdp.tests.support.forks.command import ForkedCommand
from sdp.tests.support.small_runs import run_sdp
from sdp.tools.cli import main

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-3}},
    "sdp": {
        "groups": 2,
        "capacity": 0.5,
        "profile": "uniform",
        "units": ["model.layers.*"],
        "sync": {"every": 4, "service": {"grace_seconds": 2, "heartbeat_seconds": 0.5}},
    },
    "model": {
        "name": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
    "data": {"sequence_length": 64, "tokenizer": "bytes"},
    "training": {"steps": 40, "evaluate_every": 20, "evaluate_batches": 2},
}  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def processes_of(launcher: ForkedCommand) -> list[int]:
    """The service, which began first, and the groups."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return sorted(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("sdp-rank"))


def test_a_killed_group_and_a_killed_service_come_back(tmp_path: Path) -> None:
    config, run = tmp_path / "run.json", tmp_path / "run"
    config.write_text(json.dumps(CONFIG))
    with (tmp_path / "said").open("w+") as said:
        launcher = ForkedCommand(["train", config, "--dump-dir", run], said, said)
        try:
            for number, after in ((1, 2), (0, 6)):  # a group, then the service
                while len(lines_of(run / "metrics.jsonl")) < after:
                    assert launcher.poll() is None, (tmp_path / "said").read_text()
                    time.sleep(0.05)
                os.kill(processes_of(launcher)[number], signal.SIGKILL)
            launcher.wait(240)
        finally:
            launcher.kill()
        output = (tmp_path / "said").read_text()
    assert launcher.returncode == 0, output
    assert "group process" in output
    assert "the service ended with exit code -9: restart 1 of 3" in output
    lines, order = lines_of(run / "metrics.jsonl"), json.loads((run / "data_order.json").read_text())
    assert [line["step"] for line in lines] == list(range(4, 44, 4))
    dealt = order["first"] * order["groups"] + sum(len(shares) for shares in order["dealt"].values())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples"] + summary["skipped_samples"] == dealt * order["micro_batches"] * order["width"]
    assert summary["skipped_samples"] > 0
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-36", "step-40"]
    assert lines_of(run / "evaluations.jsonl")[-1]["loss"] < lines_of(run / "evaluations.jsonl")[0]["loss"]
    _other_commands_read_it(run, config, tmp_path)


def _other_commands_read_it(run: Path, config: Path, tmp_path: Path) -> None:
    report = run_sdp("report", run).stdout
    assert re.search(r"rounds +10\ngroups alive +\d\nlate deliveries +\d", report), report
    assert re.search(r"a round of group 1 +0\.\d\d MB, \d+\.\d\d s", report), report
    found = json.loads(run_sdp("evaluate", run, "--json").stdout.splitlines()[-1])
    assert found["loss"] == pytest.approx(found["in_training"], rel=1e-5)
    export = run_sdp("export", run, "--to", "hf", tmp_path / "hf")
    assert export.returncode == 0, export.stderr
    settings = json.loads(config.read_text())
    settings["training"]["steps"] = 44
    settings["data"]["path"] = str(run / "corpus")
    del settings["sdp"]["sync"]["service"]
    for sync in (settings["sdp"]["sync"], None):
        settings["sdp"]["sync"] = sync
        config.write_text(json.dumps(settings))
        static = run_sdp("train", config, "--dump-dir", run, "--resume", "--nproc", "2")
        assert static.returncode == 0, static.stderr
        assert "training: steps" in static.stderr
        settings["training"]["steps"] += 4


def test_a_group_of_two_ranks_starts_again_in_its_directory(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tmp_path / "run.json", tmp_path / "run"
    config.write_text(json.dumps(CONFIG))
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    data = ["--set", f"data.path={corpus}", "data.tokenizer=bytes", "sdp.sync.service.wait_seconds=0.1"]
    words = ["train", config, *data, "--service", "127.0.0.1:1", "--nproc", "2", "--dump-dir", run]
    monkeypatch.setenv("SDP_SERVICE_TOKEN", "x" * 20)
    errors = run_sdp(*words).stderr
    assert "the service at 127.0.0.1:1 does not answer for 0.1 s" in errors
    assert "already holds a run" not in errors


def test_paths_of_two_sources_learn_as_without_a_service(tmp_path: Path, corpus: Path) -> None:
    lines = [json.dumps({"text": f"{number} {number * number % 997} " * 9}) for number in range(200)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    prepare([str(tmp_path / "numbers.jsonl")], tmp_path / "numbers", tokenizer="bytes", held_out=0.2, workers=1)
    settings = copy.deepcopy(CONFIG)
    settings["data"] = {"sequence_length": 32, "sources": [
        {"path": str(path), "weight": 1} for path in (corpus, tmp_path / "numbers")
    ]}  # fmt: skip
    service = {"quorum": 1.0, "grace_seconds": 60}
    settings["sdp"] = {"groups": 2, "paths": {"count": 2, "own": ["model.layers.3"]}, "sync": {"every": 4}}
    settings["training"] |= {"steps": 8, "evaluate_every": 0}
    found = []
    for name, words in (("static", ["--nproc", "2"]), ("served", [])):
        settings["sdp"]["sync"]["service"] = None if words else service
        (tmp_path / "run.json").write_text(json.dumps(settings))
        done = run_sdp("train", tmp_path / "run.json", *words, "--dump-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        found.append(lines_of(tmp_path / name / "evaluations.jsonl")[-1])
    static, served = found
    for key in ("loss", "single_path_losses", "source_losses"):
        assert served[key] == pytest.approx(static[key], rel=1e-5), key
    assert static["single_path_losses"][0] != pytest.approx(static["single_path_losses"][1], rel=1e-3)


def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps(CONFIG))
    serve = ["serve", config, "--dump-dir", tmp_path / "run"]
    for words, message in (
        ([*serve, "--bind", "127.0.0.1:0"], "SDP_SERVICE_TOKEN: the token of the service has 0 characters"),
        ([*serve, "--bind", "127.0.0.1"], "--bind 127.0.0.1: is not HOST:PORT"),
        ([*serve, "--bind", "http://127.0.0.1:1"], "--bind http://127.0.0.1:1: is not HOST:PORT"),
        (["train", config, "--check"], "a run with a service cannot be checked; add --set sdp.sync.service=null"),
        (["train", config, "--restarts", "2"], "--restarts: with sdp.sync.service, set sdp.sync.service.restarts"),
        (["train", config, "--set", "sdp.sync.start_after=2"], "sdp.sync.start_after: with sdp.sync.service groups"),
        (["train", config, "--set", "sdp.sync.service.min_groups=3"], "there are sdp.groups = 2 groups"),
        (["train", config, "--set", "training.save_every=3"], "the service saves after every round"),
    ):
        monkeypatch.setenv("SDP_SERVICE_TOKEN", "" if "SDP_SERVICE_TOKEN" in message else "x" * 20)
        assert main([*map(str, words)]) == 2
        output, errors = capsys.readouterr()
        assert message in errors
        assert (output, errors.count("\n")) == ("", 1)
