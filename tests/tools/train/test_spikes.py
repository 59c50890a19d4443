"""Runs with an injected spike of the loss, for each policy of ``training.on_spike``."""

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.checkpoint.storage.files import read_state
from sdp.tests.support.small_runs import read_losses, read_metrics, read_tensorboard, write_config
from sdp.tools.cli import main
from sdp.tools.train import trainer

STEPS, SPIKE, BATCH = 8, 6, 8
loss_of = trainer.loss_of


@pytest.fixture
def run(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Train with the loss of the given micro-batches multiplied; return the exit code."""
    config["sdp"] = {"groups": 1}
    config["scheduler"] = None
    config["tensorboard"] = {"enabled": True}
    config["training"] |= {"steps": STEPS, "evaluate_every": 0, "save_every": 4, "spike_window": 4, "spike_sigma": 50}

    def train(name: str, policy: str, bad: dict[int, float], *words: str) -> int:
        calls = iter(range(1, 1000))
        monkeypatch.setattr(trainer, "loss_of", lambda output: loss_of(output) * bad.get(next(calls), 1.0))
        path = write_config(config, tmp_path)
        return main(
            ["train", str(path), "--dump-dir", str(tmp_path / name), *words, "--set", f"training.on_spike={policy}"]
        )

    return train


def position(dump_dir: Path, step: int) -> int:
    return read_state(dump_dir / f"checkpoints/step-{step}")["loader"]["consumed"]


def test_skip_leaves_the_update_out(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("skip", "skip", {SPIKE: 1000.0}) == 0
    lines = read_metrics(tmp_path / "skip")
    assert [line["spikes_skipped"] for line in lines] == [0] * 5 + [1] * 3
    assert [line["skipped_steps"] for line in lines] == [0] * 5 + [1] * 3
    assert position(tmp_path / "skip", STEPS) == STEPS * BATCH
    assert "steps skipped for a spike" in capsys.readouterr().out
    assert run("plain", "none", {}) == 0
    assert read_losses(tmp_path / "plain")[: SPIKE - 1] == read_losses(tmp_path / "skip")[: SPIKE - 1]
    assert "spikes_skipped" not in read_metrics(tmp_path / "plain")[0]


def test_skip_resumes_with_the_same_window(run, tmp_path: Path):
    assert run("whole", "skip", {SPIKE: 1000.0}) == 0
    assert run("halves", "skip", {}, "--set", "training.steps=4") == 0
    assert run("halves", "skip", {SPIKE - 4: 1000.0}, "--resume") == 0
    keys = ("loss", "grad_norm", "spikes_skipped", "skipped_steps")
    whole, halves = (
        [[line[key] for key in keys] for line in read_metrics(tmp_path / name)] for name in ("whole", "halves")
    )
    assert whole == halves


def test_rollback_returns_to_the_checkpoint_and_reads_other_data(run, tmp_path: Path, capsys):
    assert run("plain", "none", {}) == 0
    assert run("back", "rollback", {SPIKE: 1000.0}) == 0
    lines = read_metrics(tmp_path / "back")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["rollbacks"] for line in lines] == [0] * 4 + [1] * 4
    assert [line["skipped_steps"] for line in lines] == [0] * STEPS
    assert read_losses(tmp_path / "back")[:4] == read_losses(tmp_path / "plain")[:4]
    assert read_losses(tmp_path / "back")[4] != read_losses(tmp_path / "plain")[4]
    # The samples of steps 5 and 6 are left out.
    assert position(tmp_path / "back", STEPS) == (STEPS + 2) * BATCH
    summary = json.loads((tmp_path / "back/summary.json").read_text())
    assert summary["samples"] == STEPS * BATCH
    assert main(["report", str(tmp_path / "back"), str(tmp_path / "plain")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "rollbacks after" in line]
    assert rows[-1][4] == "1"
    assert list(read_tensorboard(tmp_path / "back/tensorboard")) == list(range(1, STEPS + 1))


def test_rollback_before_the_first_checkpoint_returns_to_the_start(run, tmp_path: Path):
    assert run("back", "rollback", {6: 1000.0}, "--set", "training.save_every=7") == 0
    assert [line["rollbacks"] for line in read_metrics(tmp_path / "back")] == [1] * STEPS
    assert position(tmp_path / "back", STEPS) == (STEPS + 6) * BATCH


def test_rollbacks_that_do_not_help_end_the_run(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    always = dict.fromkeys(range(SPIKE, SPIKE + 20), 1000.0)
    assert run("back", "rollback", always, "--set", "training.max_skips=2") == 1
    assert "2 rollbacks to step 4 did not help (training.max_skips)" in capsys.readouterr().err


def test_stop_ends_the_run_before_the_update(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("stop", "stop", {SPIKE: 1000.0}) == 1
    assert len(read_metrics(tmp_path / "stop")) == SPIKE - 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step 6: the loss" in error and str(tmp_path / "stop/checkpoints/step-4") in error


def test_rollback_needs_checkpoints(run, capsys: pytest.CaptureFixture[str]):
    assert run("back", "rollback", {}, "--set", "training.save_every=0") == 2
    assert (
        'training: on_spike "rollback" returns to the last checkpoint, but save_every is 0' in capsys.readouterr().err
    )
