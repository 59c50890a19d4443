"""``sdp train`` with a schedule of maskings: metrics and report mark the phases, and a run resumes
in each of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sdp.tests.support.small_runs import read_losses, read_metrics, run_sdp, write_config
from sdp.tools.cli import main
from sdp.tools.runs.run_files import describe_phases, phases_of


def test_a_schedule_from_the_start_to_a_resume(config: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config["sdp"]["masking"] = [{"until": 0.5, "masking": "forward"}, {"masking": "backward"}]
    config["training"] |= {"steps": 8, "save_every": 2, "evaluate_every": 4, "keep": 9}
    path, whole = write_config(config, tmp_path), tmp_path / "whole"
    first = run_sdp("train", path, "--dump-dir", whole)
    assert first.returncode == 0, first.stderr
    assert "masking: forward to step 4, then backward" in first.stderr
    assert "bytes sent by this rank in step 1: " in first.stderr
    lines = read_metrics(whole)
    assert [line["masking"] for line in lines] == ["forward"] * 4 + ["backward"] * 4
    sent = [line["comm_bytes_by_kind"].get("between groups/broadcast", 0) > 0 for line in lines]
    assert sent == [False] * 3 + [True] * 5, "the copies wake at the end of step 4"
    for rank in json.loads((whole / "summary.json").read_text())["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
        assert rank["state_measured"]["frozen"] > 0
    assert "masking of the steps" in first.stdout
    assert "forward 1–4, then backward 5–8" in first.stdout
    assert "with backward masking" in first.stdout

    for newest in (2, 6):
        resumed = tmp_path / f"resumed-{newest}"
        shutil.copytree(whole, resumed)
        for folder in (resumed / "checkpoints").glob("step-*"):
            if int(folder.name.removeprefix("step-")) > newest:
                shutil.rmtree(folder)
        second = run_sdp("train", path, "--dump-dir", resumed, "--resume")
        assert second.returncode == 0, second.stderr
        assert read_losses(resumed) == read_losses(whole)
        ours, theirs = (json.loads((run / "summary.json").read_text())["held_out"] for run in (resumed, whole))
        assert ours["after"] == theirs["after"]
    assert main(["report", str(whole), "--json", "--plot", str(tmp_path / "losses.png")]) == 0
    facts = json.loads(capsys.readouterr().out)["runs"][0]
    assert facts["masking"] == "forward 1–4, then backward 5–8"
    assert set(facts["phase_seconds"]) == {"forward", "backward"}


def test_evaluate_scales_branches_as_the_phase_of_the_checkpoint(config: dict, tmp_path: Path) -> None:
    config["sdp"] |= {"masking": [{"until": 2, "masking": "forward"}, {"masking": "backward"}], "branch_scale": "eval"}
    config["training"] |= {"steps": 4, "save_every": 1, "evaluate_every": 1, "keep": 9}
    path, run = write_config(config, tmp_path), tmp_path / "run"
    trained = run_sdp("train", path, "--dump-dir", run)
    assert trained.returncode == 0, trained.stderr
    for step in (1, 3):
        evaluated = run_sdp("evaluate", run, "--step", step, "--json")
        assert evaluated.returncode == 0, evaluated.stderr
        found = json.loads(evaluated.stdout)
        assert found["loss"] == pytest.approx(found["in_training"], rel=1e-5)


def test_phases_of_metrics() -> None:
    maskings = ["forward", "forward", "backward", "forward"]
    lines = [{"step": step, "tokens": 10 * step, "masking": masking} for step, masking in enumerate(maskings, 1)]
    assert describe_phases(phases_of(lines)) == "forward 1–2, then backward 3–3, then forward 4–4"
    assert [phase.tokens for phase in phases_of(lines)] == [0, 20, 30]
    assert phases_of([{"step": 1, "tokens": 10}]) == []
    assert describe_phases([]) is None


def _message(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_plan_has_both_phases(config: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config["sdp"]["masking"] = [{"until": 3, "masking": "forward"}, {"masking": "backward"}]
    path = str(write_config(config, tmp_path))
    assert main(["plan", path, "--world", "2", "--json"]) == 0
    scheduled = json.loads(capsys.readouterr().out)
    plans = {}
    for masking in ("forward", "backward"):
        assert main(["plan", path, "--world", "2", "--json", "--set", f"sdp.masking={masking}"]) == 0
        plans[masking] = json.loads(capsys.readouterr().out)["plan"]
    assert scheduled["plan"] == plans["backward"], "a device needs the peak of the backward phase"
    assert scheduled["other_phases"]["SDP, forward"] == plans["forward"]
    assert any("forward to step 3, then backward" in note for note in scheduled["notes"])
    assert main(["plan", path, "--world", "2"]) == 0
    assert "SDP, backward" in capsys.readouterr().out


def test_a_bench_says_which_methods_time_the_phases(
    config: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config["sdp"]["masking"] = [{"until": 3, "masking": "forward"}, {"masking": "backward"}]
    path = str(write_config(config, tmp_path))
    assert "write sdp-forward,sdp-backward" in _message(capsys, "bench", path, "--methods", "sdp")
