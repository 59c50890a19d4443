"""What ``sdp train --resume`` does if settings have changed since the checkpoint."""

import json
import shutil
from pathlib import Path

from sdp.engine.checkpoint.storage.files import read_state
from sdp.tests.support.checkpoints import reseal
from sdp.tests.support.small_runs import read_metrics, run_sdp, write_config


def test_a_resume_without_a_schedule_takes_the_configured_rate(config: dict, tmp_path: Path) -> None:
    schedule = config.pop("scheduler")
    path, dump = write_config(config, tmp_path), ["--dump-dir", tmp_path / "run"]
    first = run_sdp("train", path, *dump, "--set", "training.steps=2", "training.save_every=2")
    assert first.returncode == 0, first.stderr
    changed = ["optimizer.params.lr=0.001", "optimizer.params.weight_decay=0.1", "gradient_clipping=0.25"]
    changed += ["sdp.check_interval=3", "training.steps=4"]
    second = run_sdp("train", path, *dump, "--resume", "--set", *changed)
    assert second.returncode == 0, second.stderr
    assert [line["lr"] for line in read_metrics(tmp_path / "run")] == [0.003, 0.003, 0.001, 0.001]
    for change in ("params.lr: 0.003 → 0.001", "weight_decay: unset → 0.1", "clipping: 0.5 → 0.25", "interval: 2 → 3"):
        assert f"{change}, from step 3 on" in second.stderr
    # A schedule comes and goes.
    path = write_config({**config, "scheduler": schedule}, tmp_path)
    third = run_sdp("train", path, *dump, "--resume", "--set", "training.steps=5", "training.save_every=1")
    assert third.returncode == 0, third.stderr
    assert 'scheduler.type: unset → "WSD", from step 5 on' in third.stderr
    fourth = run_sdp("train", write_config(config, tmp_path), *dump, "--resume", "--set", "training.steps=6")
    assert "this run has no schedule; the configured rates apply" in fourth.stderr
    assert read_metrics(tmp_path / "run")[-1]["lr"] == 0.003


def test_slices_that_keep_their_weights_have_a_whole_checkpoint(config: dict, tmp_path: Path) -> None:
    config["sdp"] |= {
        "granularity": "neuron", "neuron_groups": 4, "profile": "uniform",
        "sync": {"every": 2, "single_holder": "skip"},
    }  # fmt: skip
    config["training"] |= {"steps": 5, "save_every": 3}
    path = write_config(config, tmp_path)
    whole = run_sdp("train", path, "--dump-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "WARNING: no checkpoint" not in whole.stderr


def test_an_average_under_way_is_applied_where_no_later_step_would(config: dict, tmp_path: Path) -> None:
    config["sdp"]["sync"] = {"every": 4, "overlap": 2}
    config["training"] |= {"steps": 10, "save_every": 5, "keep": 3}
    path, run = write_config(config, tmp_path), tmp_path / "run"
    first = run_sdp("train", path, "--dump-dir", run)
    assert first.returncode == 0, first.stderr
    shutil.rmtree(run / "checkpoints" / "step-10")  # the average that starts after step 4 is applied after step 6
    assert read_state(run / "checkpoints" / "step-5")["sync"]["under_way"] == 0
    for change, expected in (("sdp.sync.overlap=0", 2), ("sdp.sync.every=3", 2), ("sdp.sync.start_after=1", 1)):
        again = shutil.copytree(run, tmp_path / change)
        second = run_sdp("train", path, "--dump-dir", again, "--resume", "--set", change)
        assert second.returncode == 0, second.stderr
        lines = read_metrics(again)
        assert [line["step"] for line in lines] == list(range(1, 11))
        assert next(line["outer_step"] for line in lines[5:] if "outer_step" in line) == expected


def test_another_corpus_of_equal_length_is_refused(config: dict, tmp_path: Path) -> None:
    texts = ["".join(chr(97 + (start + step * index) % 26) for index in range(400)) for start, step in ((0, 1), (3, 5))]
    for number, text in enumerate(texts):
        lines = "".join(f'{{"text": "{text[i : i + 40]} {i}"}}\n' for i in range(0, 360, 4))
        (tmp_path / f"{number}.jsonl").write_text(lines)
        command = ["prepare", "--input", tmp_path / f"{number}.jsonl", "--output", tmp_path / f"data-{number}"]
        prepared = run_sdp(*command, "--tokenizer", "bytes", "--held-out", "0.3", "--workers", "1")
        assert prepared.returncode == 0, prepared.stderr
    config["data"]["path"] = str(tmp_path / "data-0")
    path, dump = write_config(config, tmp_path), ["--dump-dir", tmp_path / "run"]
    settings = ['sdp={"groups": 1}', "data.sequence_length=16"]
    first = run_sdp("train", path, *dump, "--set", *settings, "training.steps=3")
    assert first.returncode == 0, first.stderr
    other = run_sdp("train", path, *dump, "--resume", "--set", *settings, f"data.path={tmp_path / 'data-1'}")
    assert other.returncode == 2
    assert "was trained with another corpus (sha256 " in other.stderr


def test_wrong_values_in_the_state_of_a_run_are_one_line(config: dict, tmp_path: Path) -> None:
    path, dump = write_config(config, tmp_path), ["--dump-dir", tmp_path / "run"]
    alone = ["--set", 'sdp={"groups": 1}', "training.save_every=2"]
    assert run_sdp("train", path, *dump, *alone, "training.steps=2").returncode == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    original = (checkpoint / "state.json").read_text()
    state = json.loads(original)
    changes = [
        {"spikes": {"loss": 5}}, {"loader": state["loader"] | {"consumed": "x"}},
        {"scheduler": {"last_batch_iteration": "x"}}, {"client_state": {"tokenizer": 3}},
        {"learning_rates": {"a": "x"}}, {"settings": {"config": {"a\x1b[31m": 1}, "options": 3}},
    ]  # fmt: skip
    for change in changes:
        (checkpoint / "state.json").write_text(original)
        reseal(checkpoint, **change)
        resumed = run_sdp("train", path, *dump, "--resume", *alone, "training.steps=3")
        assert "Traceback" not in resumed.stderr and "\x1b" not in resumed.stderr + resumed.stdout, change
        if "settings" in change:
            assert resumed.returncode == 0 and "a\\x1b[31m: 1 → unset" in resumed.stderr
        else:
            assert resumed.returncode == 2 and resumed.stderr.count("sdp: error") == 1, change
