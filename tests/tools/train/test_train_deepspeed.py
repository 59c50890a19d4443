"""``sdp train`` over DeepSpeed in groups of two ranks, resumed and read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.small_runs import run_sdp
from sdp.tools.cli import main


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@needs_deepspeed
def test_a_run_in_groups_of_two_ranks_is_that_of_fsdp2(trained_run, tmp_path, capsys):
    whole = json.loads((trained_run / "config.json").read_text())
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "optimizer": whole["optimizer"],
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "sdp": {"groups": 2, "capacity": 0.75, "engine": "deepspeed"},
        "model": whole["model"],
        "data": whole["data"],
        "training": {"steps": 4, "evaluate_batches": 2, "save_every": 2},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-P", "-m", "sdp", "train", path, "--dump-dir", tmp_path / "run", "--fsdp", "2"]
    for more in (["--set", "training.steps=2"], ["--resume"]):
        finished = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
        assert finished.returncode == 0, finished.stderr
    assert "layout: sdp 2 × fsdp 2 × tp 1 processes, ZeRO stage 3" in finished.stderr
    fsdp2 = ["--dump-dir", tmp_path / "fsdp2", "--set", "sdp.engine=fsdp2", 'zero_optimization={"stage": 3}']
    finished = run_sdp("train", path, "--fsdp", 2, *fsdp2)
    assert finished.returncode == 0, finished.stderr
    ours, theirs = (lines(tmp_path / name / "metrics.jsonl") for name in ("run", "fsdp2"))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-4)
    assert len({line["loss"] for line in ours}) == 4

    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert loss == pytest.approx(lines(tmp_path / "run" / "evaluations.jsonl")[-1]["loss"], rel=1e-5)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "sdp 2 × fsdp 2" in capsys.readouterr().out
