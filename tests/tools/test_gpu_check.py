"""``sdp gpu-check`` in its tiny form: what is not CUDA's own of the path, figures never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it makes process groups."""
    command = [sys.executable, "-P", "-m", "sdp.launcher.main", "gpu-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def test_dense_and_half_shares_of_both_models(tmp_path: Path) -> None:
    file = tmp_path / "new" / "check.json"
    done = check("--device", "cpu", "--tiny", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["settings"]["bf16_matmul_flops_per_second"] > 0
    shares = report["shares"]
    assert [(share["config"], share["capacity"]) for share in shares] == [
        ("llama_134m", 1.0), ("llama_134m", 0.5), ("llama_1b", 1.0), ("llama_1b", 0.5),
    ]  # fmt: skip
    layer, shared = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 128 * 32 + 32
    for share in shares:
        assert share["error"] == ""
        assert share["parameters"] == shared + 8 * share["capacity"] * layer
        assert share["state_bytes"] == 16 * share["parameters"]  # weights, gradients and two moments in float32
        tokens = share["tokens_per_step"]
        assert tokens == 2 * 32
        per_layer = 3 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 4 * 32 * 32)
        assert share["flops_per_step"] == pytest.approx(tokens * (6 * 32 * 128 + 8 * share["capacity"] * per_layer))
        assert share["tokens_per_second"] == pytest.approx(tokens / share["step_seconds"])
        assert 0 < share["loss"] < 10
    assert set(report["ratios"]) == {"llama_134m", "llama_1b"}
    assert done.stdout.count("tokens/s") == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    done = check("--json", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr
    assert "torch finds no CUDA device here; nothing was checked" in done.stdout
    assert json.loads((tmp_path / "check.json").read_text()) == {"skipped": "no CUDA device"}
