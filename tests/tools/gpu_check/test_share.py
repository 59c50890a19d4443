"""``sdp gpu-check --tiny``: what is measured of a share, on a CPU. Speeds are never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.errors import NonFiniteError
from sdp.tools.gpu_check import command
from sdp.tools.gpu_check import share as gpu_share
from sdp.tools.gpu_check.rows import UNCOMPILED, job_of
from sdp.tools.gpu_check.share import (
    FLASH,
    UPDATE,
    WrongKernelError,
    measure,
    require_kernels,
    require_training,
    time_calls,
)

ROOT = Path(command.__file__).parents[2]


NEEDED = {"torch", "numpy", "pydantic", "einops", "safetensors", "jinja2"}


def not_needed() -> list[str]:
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    names = {line.partition("=")[0].rstrip(">") for line in metadata["options"]["install_requires"].split()}
    assert names > NEEDED
    return sorted(names - NEEDED)


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it makes process groups; the packages that it should do
    without cannot be imported there.
    """
    lines = [
        "import sys",
        *(f"sys.modules[{name!r}] = None" for name in not_needed()),
        "from sdp.tools.cli import entry",
        "entry()",
    ]
    command = [sys.executable, "-P", "-c", "\n".join(lines), "gpu-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)


def tiny(file: Path, *words: str) -> tuple[dict[str, Any], str]:
    done = check("--device", "cpu", "--tiny", "--json", str(file), *words)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_shares_are_measured_and_compared_with_their_plan(tmp_path: Path) -> None:
    names = ["1 dense", "0.5 block forward"]
    report, printed = tiny(tmp_path / "new" / "check.json", "--configs", "llama_1b", "--variants", *names)
    assert report["settings"]["bf16_matmul_flops_per_second"] > 0
    assert report["finished"] is True
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
        assert share["kernels"] == sorted([UPDATE, *FLASH["cpu"]])  # of compiled blocks
    assert shares[0]["graphs"] > shares[1]["graphs"]
    assert shares[0]["speed_over_bound"] == 1.0
    faster = shares[1]["tokens_per_second"] / shares[0]["tokens_per_second"]
    assert shares[1]["speed_over_bound"] == pytest.approx(
        faster * shares[1]["planned"]["flops"] / shares[0]["planned"]["flops"]
    )
    assert [goal["text"].split(":")[0] for goal in report["goals"]] == ["llama_1b 1 dense"] + 2 * [
        "llama_1b 0.5 block forward"
    ]
    assert printed.count("tokens/s  MFU") == 2
    assert "collectives return at once, so tokens/s are an upper bound" in printed


@pytest.mark.slow
def test_every_kind_of_share_runs(tmp_path: Path) -> None:
    kinds = [f"0.5 {by} {masking}" for by in ("block", "neuron") for masking in ("forward", "backward")]
    report, _ = tiny(
        tmp_path / "check.json", "--minutes", "60", "--configs", "llama_1b", "--variants", UNCOMPILED.name, *kinds
    )
    shares = {share["name"]: share for share in report["shares"]}
    assert {name: share["error"] for name, share in shares.items()} == dict.fromkeys([*kinds, UNCOMPILED.name], "")
    assert [shares[kind]["mfu"] is not None for kind in kinds] == [True, False, False, False]
    assert shares[UNCOMPILED.name]["graphs"] == 0


@pytest.mark.parametrize(
    ("operators", "fused", "complaint"),
    [
        (
            {UPDATE, "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward"},
            True,
            None,
        ),
        ({UPDATE, "aten::_scaled_dot_product_cudnn_attention"}, True, None),
        (
            {UPDATE, "aten::_scaled_dot_product_efficient_attention"},
            True,
            "attention ran as aten::_scaled_dot_product_efficient_attention",
        ),
        (
            {UPDATE, "aten::_scaled_dot_product_attention_math"},
            True,
            "attention ran as aten::_scaled_dot_product_attention_math",
        ),
        ({UPDATE, "aten::bmm", "aten::_softmax"}, True, "attention did not run as one operator"),
        (
            {"aten::_foreach_add_", "aten::_scaled_dot_product_flash_attention"},
            True,
            "update did not run as aten::_fused_adamw_",
        ),
        ({UPDATE, "aten::_scaled_dot_product_flash_attention"}, False, "update did not run as aten::_fused_adamw_"),
    ],
)
def test_other_kernels_than_meant_are_an_error(operators: set[str], fused: bool, complaint: str | None) -> None:
    groups = [{"fused": True}, {"fused": fused}]
    if complaint is None:
        require_kernels(operators, groups, torch.device("cuda"))
    else:
        with pytest.raises(WrongKernelError, match=complaint):
            require_kernels(operators, groups, torch.device("cuda"))


def test_steps_without_an_update_or_a_loss_are_an_error() -> None:
    require_training(0, 4.2)
    for skipped, loss in ((1, 4.2), (0, float("nan"))):
        with pytest.raises(NonFiniteError, match="what was timed is not training"):
            require_training(skipped, loss)


def test_a_row_fails_where_its_kernels_or_its_steps_are_not_those_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    job, cpu = job_of(UNCOMPILED, tiny=True), torch.device("cpu")
    with (
        monkeypatch.context() as patch,
        pytest.raises(WrongKernelError, match="attention ran as aten::_scaled_dot_product_flash"),
    ):
        patch.setitem(FLASH, "cpu", {"aten::_scaled_dot_product_cudnn_attention"})
        measure(job, cpu, tiny=True)
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="steps were skipped, and the loss is nan"):
        patch.setattr(
            gpu_share,
            "draw_weights",
            lambda engine, rule: [p.data.fill_(float("nan")) for p in engine.parameters_here.values()],
        )
        job.config["training"]["max_skips"] = 100
        measure(job, cpu, tiny=True)


def test_steps_are_timed_for_so_long_but_no_fewer_than_asked_for() -> None:
    cpu = torch.device("cpu")
    assert len(time_calls(lambda: None, cpu, least=2, most=4)) == 4
    seconds = time_calls(lambda: time.sleep(0.002), cpu, least=3, most=100, seconds=0.0)
    assert len(seconds) == 3
    assert min(seconds) >= 0.002
