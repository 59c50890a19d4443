"""``sdp train`` end to end: real processes, real text, real files."""

import json
import os
import shutil
from pathlib import Path

import pytest
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.forks.command import ForkedCommand
from sdp.tests.support.small_runs import STEPS, read_losses, read_metrics, run_sdp, tiny_config, write_config
from sdp.tools.cli import main


def test_a_run_of_four_processes_its_files_and_its_resume_on_two_and_under_tensor_parallelism(config, tmp_path):
    config["model"]["vocab_size"] = 272  # that of bytes is 257, which two ranks cannot share
    path = write_config(config, tmp_path)
    whole = run_sdp("train", path, "--fsdp", 2, "--dump-dir", tmp_path / "whole", "--set", "zero_optimization.stage=2")
    assert whole.returncode == 0, whole.stderr
    check_files(tmp_path / "whole")

    # The same groups and the same samples a step on half the processes, and on two tensor-parallel
    # ranks a group: the same run to rounding.
    for name, *words in (("moved",), ("tp", "--tp", 2, "--set", "zero_optimization.stage=3")):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/step-6")
        second = run_sdp("train", path, "--dump-dir", tmp_path / name, "--resume", *words)
        assert second.returncode == 0, second.stderr
        assert f"resumed from {tmp_path / name / 'checkpoints/step-3'}" in second.stderr
        assert [line["step"] for line in read_metrics(tmp_path / name)] == list(range(1, STEPS + 1))
        losses, undisturbed = read_losses(tmp_path / name), read_losses(tmp_path / "whole")
        assert losses[:3] == undisturbed[:3] and losses == pytest.approx(undisturbed, rel=1e-5)
    ranks = json.loads((tmp_path / "tp/summary.json").read_text())["ranks"]
    assert len(ranks) == 4 and all(rank["state_measured"] == rank["state_predicted"] for rank in ranks)


def check_files(dump_dir: Path) -> None:
    lines = read_metrics(dump_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    keys = "tokens loss grad_norm lr tokens_per_second step_seconds peak_memory_bytes comm_bytes"
    for key in keys.split():
        assert all(isinstance(line[key], int | float) for line in lines), key
    for line in lines:
        parts = [line[f"{part}_seconds"] for part in ("data", "forward", "backward", "exposed_reduction", "optimizer")]
        assert min(parts) >= 0 and line["exposed_reduction_seconds"] > 0
        assert sum(parts) <= line["step_seconds"]
    assert lines[-1]["tokens"] == STEPS * 8 * 32
    assert lines[-1]["loss"] < lines[0]["loss"]
    summary = json.loads((dump_dir / "summary.json").read_text())
    assert len(summary["ranks"]) == 4
    for rank in summary["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
        assert 0 < rank["state_measured"]["optimizer"] < summary["dense_state_bytes"]["optimizer"]
        assert rank["peak_tensor_bytes"] > sum(rank["state_measured"].values())
    evaluations = [json.loads(line) for line in (dump_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert all(len(line["subnetwork_losses"]) == 2 for line in evaluations)
    assert summary["held_out"] == {"before": evaluations[0]["loss"], "after": evaluations[-1]["loss"]}
    assert json.loads((dump_dir / "placement.json").read_text())["groups"] == 2
    assert json.loads((dump_dir / "config.json").read_text())["zero_optimization"]["stage"] == 2
    assert (dump_dir / "plots" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in (dump_dir / "checkpoints").glob("step-*")) == ["step-3", "step-6"]
    assert {f"rank-{rank}.log" for rank in range(4)} <= {p.name for p in (dump_dir / "logs").iterdir()}
    log = (dump_dir / "logs" / "rank-0.log").read_text()
    assert " INFO step 6/6  loss " in log and " INFO step 6: held-out loss " in log


def test_a_run_whose_output_nobody_reads_ends_well(corpus, tmp_path):
    path = write_config(tiny_config(corpus, groups=2, steps=1), tmp_path)
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as unread, (tmp_path / "stderr").open("w") as errors:
        command = ForkedCommand(["train", path, "--dump-dir", tmp_path / "run"], unread, errors)
    code, said = command.wait(240), (tmp_path / "stderr").read_text()
    assert (code, "Traceback" in said) == (0, False), said
    assert len(read_metrics(tmp_path / "run")) == 1


@pytest.mark.slow
def test_neurons_train_resume_and_go_on_as_blocks(config, tmp_path):
    section = {"groups": 2, "capacity": 0.5, "granularity": "neuron", "neuron_groups": 4}
    path = write_config(config | {"sdp": section, "train_micro_batch_size_per_gpu": 4}, tmp_path)
    for name, *words in (("whole",), ("halves", "--set", "training.steps=3"), ("halves", "--resume")):
        assert run_sdp("train", path, "--dump-dir", tmp_path / name, *words).returncode == 0
    assert read_losses(tmp_path / "halves") == read_losses(tmp_path / "whole")
    last = json.loads((tmp_path / "whole" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["subnetwork_losses"][0] != pytest.approx(last["loss"], rel=1e-4)
    for rank in json.loads((tmp_path / "whole" / "summary.json").read_text())["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
    # The same run goes on in blocks: names and shapes are those of the full model.
    blocks = ["sdp.granularity=block", "sdp.neuron_groups=8", "training.steps=7"]
    assert run_sdp("train", path, "--dump-dir", tmp_path / "whole", "--resume", "--set", *blocks).returncode == 0
    assert len(read_losses(tmp_path / "whole")) == 7


def test_a_resume_counts_tokens_on_and_refuses_fewer_steps(config, tmp_path, capsys):
    config["sdp"] = {"groups": 1}
    config["scheduler"] = None
    config["training"] |= {"steps": 3, "save_every": 1}
    run = ["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]
    assert main(run) == 0
    assert main([*run, "--resume", "--set", "training.steps=5", "train_batch_size=16"]) == 0
    assert [line["tokens"] for line in read_metrics(tmp_path / "run")] == [256, 512, 768, 1280, 1792]
    capsys.readouterr()
    assert main([*run, "--resume", "--set", "training.steps=4"]) == 2
    assert "training.steps: 4, but" in capsys.readouterr().err


def test_a_run_is_found_again_from_another_directory(config, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(corpus.parent)
    config["data"]["path"] = corpus.name
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 1, "save_every": 1}
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "run"]) == 0


def test_a_check_trains_nothing(config: dict, tmp_path: Path) -> None:
    checked = run_sdp("train", write_config(config, tmp_path), "--dump-dir", tmp_path / "run", "--check")
    assert checked.returncode == 0, checked.stderr
    dense, equal, held, not_compared = checked.stdout.splitlines()
    assert (
        dense
        == "every group holds the whole model: 3 steps; after each, holders have equal weights and optimizer state"
    )
    assert equal.startswith("every group holds the whole model: equals plain torch: weights differ by ")
    assert held.startswith("as configured: 3 steps")
    assert "only capacity 1.0 can be compared" in not_compared
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


@pytest.mark.slow
@needs_deepspeed
def test_a_run_over_deepspeed_is_that_of_fsdp2(trained_run, tmp_path, capsys):
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
    for more in (["--set", "training.steps=2"], ["--resume"]):
        finished = run_sdp("train", path, "--dump-dir", tmp_path / "run", "--fsdp", 2, *more, new_interpreters=True)
        assert finished.returncode == 0, finished.stderr
    assert "layout: sdp 2 × fsdp 2 × tp 1 processes, ZeRO stage 3" in finished.stderr
    fsdp2 = ["--dump-dir", tmp_path / "fsdp2", "--set", "sdp.engine=fsdp2", 'zero_optimization={"stage": 3}']
    finished = run_sdp("train", path, "--fsdp", 2, *fsdp2)
    assert finished.returncode == 0, finished.stderr
    ours, theirs = (read_metrics(tmp_path / name) for name in ("run", "fsdp2"))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-4)
    assert len({line["loss"] for line in ours}) == 4

    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert loss == pytest.approx(summary["held_out"]["after"], rel=1e-5)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "sdp 2 × fsdp 2" in capsys.readouterr().out
