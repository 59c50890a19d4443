"""``sdp gpu-check`` in its tiny form: what is not CUDA's own of the path, figures never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it makes process groups."""
    command = [sys.executable, "-P", "-m", "sdp.launcher.main", "gpu-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)


def tiny(file: Path, *words: str) -> tuple[dict[str, Any], str]:
    done = check("--device", "cpu", "--tiny", "--json", str(file), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_shares_are_measured_beside_their_plan(tmp_path: Path) -> None:
    names = ["1 dense", "0.5 block forward"]
    report, printed = tiny(tmp_path / "new" / "check.json", "--configs", "llama_1b", "--variants", *names)
    assert report["settings"]["bf16_matmul_flops_per_second"] > 0
    assert report["not_run"] == []
    shares = report["shares"]
    assert [(share["config"], share["name"]) for share in shares] == [("llama_1b", name) for name in names]
    layer, shared = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 128 * 32 + 32
    tokens, per_layer = 2 * 32, 3 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 4 * 32 * 32)
    for share in shares:
        assert share["error"] == ""
        assert share["tokens_per_step"] == tokens
        assert share["tokens_per_second"] == pytest.approx(tokens / share["step_seconds"])
        assert share["state_bytes"] == share["planned"]["state_bytes"]
        assert 0 < share["loss"] < 10
        capacity = share["variant"]["capacity"]
        assert share["parameters"] == shared + 8 * capacity * layer
        assert share["state_bytes"] == 16 * share["parameters"]  # weights, gradients and two moments in float32
        assert share["flops_per_step"] == pytest.approx(tokens * (6 * 32 * 128 + 8 * capacity * per_layer))
        assert share["planned"]["flops"] > share["flops_per_step"]  # the configuration recomputes
        assert share["mfu"] > 0
        assert share["peak_over_planned"] == share["peak_memory_bytes"] / share["planned"]["peak_memory_bytes"]
    assert shares[0]["speed_over_bound"] == 1.0
    faster = shares[1]["tokens_per_second"] / shares[0]["tokens_per_second"]
    assert shares[1]["speed_over_bound"] == pytest.approx(faster * shares[1]["planned"]["flops"] / shares[0]["planned"]["flops"])
    assert [goal["text"].split(":")[0] for goal in report["goals"]] == ["llama_1b 1 dense"] + 2 * ["llama_1b 0.5 block forward"]
    assert printed.count("tokens/s  MFU") == 2


def test_rows_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    report, printed = tiny(tmp_path / "check.json", "--minutes", "0", "--configs", "llama_134m")
    assert report["shares"] == report["goals"] == []
    assert len(report["not_run"]) == 1 + 3 * 4
    assert "no time was left, of 0 minutes, for: llama_134m 1 dense, llama_134m 0.75 block forward" in printed


@pytest.mark.slow
def test_every_kind_of_share_runs(tmp_path: Path) -> None:
    kinds = [f"0.5 {by} {masking}" for by in ("block", "neuron") for masking in ("forward", "backward")]
    report, _ = tiny(tmp_path / "check.json", "--minutes", "60", "--configs", "llama_134m", "--variants", *kinds)
    assert [(share["name"], share["error"]) for share in report["shares"]] == [(kind, "") for kind in kinds]
    assert [share["mfu"] is not None for share in report["shares"]] == [True, False, False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    done = check("--json", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr
    assert "torch finds no CUDA device here; nothing was checked" in done.stdout
    assert json.loads((tmp_path / "check.json").read_text()) == {"skipped": "no CUDA device"}
