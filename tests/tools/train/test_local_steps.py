"""``sdp train`` with local steps: outer steps in the metrics, a final average, a resume in the
middle of a round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sdp.tests.support.small_runs import read_losses, read_metrics, run_sdp, write_config
from sdp.tools.cli import main


def test_local_steps_from_the_start_to_a_resume(config: dict, tmp_path: Path, capsys) -> None:
    config["sdp"]["sync"] = {"every": 3}
    config["training"] |= {"steps": 8, "save_every": 4, "evaluate_every": 4, "keep": 3}
    config["scheduler"]["params"]["total_num_steps"] = 9
    path, whole = write_config(config, tmp_path), tmp_path / "whole"
    first = run_sdp("train", path, "--dump-dir", whole)
    assert first.returncode == 0, first.stderr
    assert "sync: groups step on their own and average their weights every 3 steps" in first.stderr
    lines = read_metrics(whole)
    averaged = [line["step"] for line in lines if line["comm_bytes_by_kind"].get("between groups/all_reduce")]
    assert averaged == [3, 6, 8], "every three steps, and at the end"
    assert [line["outer_step"] for line in lines if "outer_step" in line] == [1, 2, 3]
    assert all(line["drift"] > 0 and line["outer_grad_norm"] > 0 for line in lines if "outer_step" in line)
    assert all(line["comm_bytes"] < 1024 for line in lines if "outer_step" not in line)
    summary = json.loads((whole / "summary.json").read_text())
    for rank in summary["ranks"]:
        assert rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]
        assert rank["state_measured"] == rank["state_predicted"]
        assert rank["state_measured"]["outer"] > 0
    assert "anchors and outer state" in first.stdout

    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-8")
    second = run_sdp("train", path, "--dump-dir", resumed, "--resume")
    assert second.returncode == 0, second.stderr
    assert read_losses(resumed) == read_losses(whole)
    ours, theirs = (json.loads((run / "summary.json").read_text())["held_out"] for run in (resumed, whole))
    assert ours["after"] == theirs["after"]

    assert main(["evaluate", str(whole)]) == 0
    assert f"{theirs['after']:.4f}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"every": 4, "fragments": 3}, "every 4 is not divisible by fragments 3"),
        ({"every": 4, "fragments": 2, "overlap": 2}, "overlap 2 must be less than every / fragments = 2"),
        ({"fragments": 2}, "sdp.sync.every: this key is required"),
    ],
)
def test_mistakes_are_one_line(config: dict, tmp_path: Path, sync: dict, message: str, capsys) -> None:
    config["sdp"]["sync"] = sync
    assert main(["config", str(write_config(config, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
