"""Groups of a run are killed, stopped and come back. No step and no sample is lost or doubled."""

from __future__ import annotations

import csv
import json
import random
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sdp.data.shards import TokenDataset
from sdp.engine.elastic import returning
from sdp.tests.support.clusters.elastic_runs import MICRO, ElasticRun, Start, elastic_config
from sdp.tests.support.forks.command import run_forked
from sdp.tests.support.processes import until
from sdp.tests.support.small_runs import make_corpus, read_tensorboard

ZERO, DEEPSPEED = "zero_optimization.stage=", "sdp.engine=deepspeed "


def check_lines(lines: list[dict[str, Any]], ranks: int = 1) -> None:
    """Each step is written once, and its samples are those of the groups that were alive."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    samples = 0
    for line in lines:
        samples += line["groups"] * ranks * MICRO
        assert line["samples"] == samples
    assert [line["generation"] for line in lines] == sorted(line["generation"] for line in lines)
    assert all(line["loss"] < 7 for line in lines)


def check_end(run: ElasticRun, ranks: int = 1) -> None:
    """The run ends at a signal, with all of its lines and a checkpoint of the last step.

    The terminal has shown its progress.
    """
    assert run.stop() == 128 + signal.SIGTERM, run.said
    lines = run.lines()
    check_lines(lines, ranks)
    saved = json.loads((run.dump_dir / "checkpoints" / f"step-{len(lines)}" / "state.json").read_text())
    # What was read for a step that was not committed is read again, so each sample counts once.
    assert saved["loader"]["consumed"] == saved["global_samples"] == lines[-1]["samples"]
    check_progress(run.said, lines)


def check_progress(said: str, lines: list[dict[str, Any]]) -> None:
    """Every tenth step is shown once, with the number of groups, whichever group writes the files.

    A step may be missing after which a group was lost, because that group may have shown the
    progress.
    """
    shown = [
        (int(step), int(groups))
        for step, groups in re.findall(r"^step +(\d+)/.* groups (\d+)  generation \d+$", said, re.M)
    ]
    due = {line["step"]: (line["step"], line["groups"]) for line in lines if line["step"] % 10 == 0}
    assert shown and len(set(shown)) == len(shown), said
    assert set(shown) <= set(due.values()), said
    changes = {line["step"] for line, after in pairwise(lines) if line["generation"] != after["generation"]}
    assert {step for step in due if step not in changes} <= {step for step, _ in shown}, said


def evaluations(run: ElasticRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dump_dir / "evaluations.jsonl").read_text().splitlines()]


def test_three_groups_are_killed_and_come_back(start: Start) -> None:
    """Holders are compared after each step, so a returning group is equal in its first step."""
    draws = random.Random(4)
    run = start(restarts=10)
    run.wait_for(10, groups=4)
    for _ in range(3):
        run.lose(draws.randrange(4), of=4)
    check_end(run)
    said = run.said
    assert re.search(r"^lost groups: .*4 units survive 1.*\. Every unit survives the loss of any 1$", said, re.M), said
    assert (
        len(re.findall(r"group \d on \S+ was lost after step \d+ \(.*\); groups .* went on after [\d.]+ s", said)) == 3
    )
    assert len(re.findall(r"group \d on \S+ joined after step \d+", said)) == 3
    steps = [line["step"] for line in evaluations(run)]
    assert steps == list(range(0, steps[-1] + 1, 40))


def test_a_group_that_cannot_start_again_does_not_end_the_others(start: Start) -> None:
    """Somebody has changed the configuration for another run, and it is wrong."""
    run = start(restarts=10)
    run.wait_for(5, groups=4)
    (run.dump_dir.parent / "config.json").write_text('{"sdp": {"groups": "many"}}')
    run.hit(2, signal.SIGKILL)
    end = r"group 2: rank 2 on \S+ ended with exit code 2.* \(sdp\.groups: .*\); it is not started again"
    until(lambda: re.search(end, run.said), seconds=60)
    run.wait_for(10, groups=3)
    check_end(run)
    assert "restart 2 of" not in run.said


def damage_what_returns() -> None:
    """Let a group that returns get one weight that differs in its last bit."""
    copy, damaged = returning.copy_value, list[str]()

    def copies(tensor: torch.Tensor, value: torch.Tensor) -> None:
        copy(tensor, value)
        if tensor.ndim > 1 and not damaged:
            tensor.detach().reshape(-1)[:1].view(torch.int32).bitwise_xor_(1)
            damaged.append("one")

    returning.copy_value = copies


def test_a_returning_group_that_differs_in_one_bit_ends_the_run(start: Start) -> None:
    """So the other tests, in which nothing ends the run, show that holders are equal."""
    run = start(restarts=1, prepare=damage_what_returns)
    run.wait_for(10, groups=4)
    run.hit(1, signal.SIGKILL)
    assert run.end() == 1, run.said
    assert "weights or optimizer state of rank 1 (group 1) differ from those of rank 0 (group 0)" in run.said
    (joined,) = re.findall(r"^sdp: group 1 on \S+ joined after step (\d+)", run.said, re.M)
    assert run.lines()[-1]["step"] <= int(joined) + 1


def test_a_group_that_hangs_is_cut_off_and_rejoins_when_it_wakes_up(start: Start) -> None:
    """It wrote the run's files, and keeps its lock while it is stopped."""
    run = start(restarts=3, heartbeat_seconds=5)
    run.wait_for(10, groups=4)
    run.hit(0, signal.SIGSTOP)
    run.wait_for(5, groups=3)
    assert "no heartbeat for 5 s" in run.said
    run.hit(0, signal.SIGCONT)
    run.wait_for(5, groups=4)
    check_end(run)
    assert re.search("^group [123] writes the files of the run, and shows its progress, from now on$", run.said, re.M)


@pytest.mark.slow
def test_two_groups_are_killed_at_once(start: Start) -> None:
    """Groups 1 and 3 hold the whole model."""
    placement = {"layers.0": [0, 1, 3], "layers.1": [1, 2, 3], "layers.2": [0, 1, 3], "layers.3": [1, 2, 3]}
    run = start(settings={"placement": placement}, restarts=5)
    run.wait_for(10, groups=4)
    run.lose(0, 2, of=4)
    check_end(run)


@pytest.mark.slow
def test_a_returning_group_has_the_loss_scale_of_the_others(start: Start) -> None:
    """The writer is killed, so that another group writes the next lines.

    The scale doubles after every eighth step without an overflow. All groups count these steps.
    """
    words = ["--set", 'fp16={"enabled": true, "loss_scale_window": 8, "initial_scale_power": 8}']
    run = start(*words, restarts=5)
    run.wait_for(12, groups=4)
    run.lose(0, of=4)
    check_end(run)
    lines = run.lines()
    assert not any(line["skipped_steps"] for line in lines), "an overflow would make another scale right"
    assert [line["loss_scale"] for line in lines] == [2.0 ** (8 + index // 8) for index in range(len(lines))]


@pytest.mark.parametrize(
    ("words", "masking", "granularity"),
    [
        pytest.param(ZERO + "1", "forward", "block", marks=pytest.mark.slow),
        pytest.param(ZERO + "2", "forward", "block", marks=pytest.mark.slow),
        pytest.param(ZERO + "3", "forward", "block", marks=pytest.mark.slow),
        pytest.param(ZERO + "3", "backward", "block", marks=pytest.mark.slow),
        pytest.param(ZERO + "3", "forward", "neuron", marks=pytest.mark.slow),
        (DEEPSPEED + ZERO + "3", "backward", "block"),
        pytest.param(DEEPSPEED + ZERO + "0", "backward", "block", marks=pytest.mark.slow),
        pytest.param(DEEPSPEED + ZERO + "1", "forward", "neuron", marks=pytest.mark.slow),
        pytest.param(DEEPSPEED + ZERO + "2", "forward", "block", marks=pytest.mark.slow),
    ],
)
def test_a_rank_inside_a_group_is_killed(start: Start, words: str, masking: str, granularity: str) -> None:
    """Its group ends with it. The others keep their shards, and count what they send."""
    settings = {"capacity": 0.7, "masking": masking, "granularity": granularity}
    run = start("--set", *words.split(), groups=3, ranks=2, settings=settings, restarts=3)
    run.wait_for(5, groups=3)
    run.lose(2, of=3)
    check_end(run, ranks=2)
    kinds = run.lines()[-1]["comm_bytes_by_kind"]
    assert ("between groups/broadcast" in kinds) == (masking == "backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "granularity", "ranks", "stage"),
    [("backward", "block", 2, 0), ("backward", "block", 4, 3), ("backward", "neuron", 4, 2)],
)
def test_a_rank_of_tensor_parallel_groups_is_killed(
    start: Start, tmp_path: Path, masking: str, granularity: str, ranks: int, stage: int
) -> None:
    """Two ranks share the 280 rows of the embedding. Bytes would have 257.

    In groups of four ranks, two pairs of them also share the shards of ZeRO.
    """
    corpus = make_corpus(tmp_path, vocab_size=280)
    words = ["--set", "tensor_parallel.autotp_size=2", f"data.path={corpus}", *(ZERO + str(stage)).split()]
    settings = {"capacity": 0.7, "masking": masking, "granularity": granularity}
    if granularity == "neuron":
        words.append("model.num_attention_heads=8")
        settings["neuron_groups"] = 4
    run = start(*words, groups=3, ranks=ranks, settings=settings, restarts=3)
    run.wait_for(5, groups=3)
    run.lose(2, of=3)
    check_end(run, ranks=ranks // 2)


def test_a_run_that_lacks_a_group_is_evaluated_exported_and_reported(
    start: Start, corpus: Path, tmp_path: Path
) -> None:
    """transformers computes the loss of the last evaluation, which three of four groups made."""
    run = start(steps=160, restarts=0)
    run.wait_for(10, groups=4)
    run.hit(1, signal.SIGKILL)
    assert run.end() == 0, run.said
    exported = run_forked("export", run.dump_dir, tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    held_out, rows = TokenDataset(str(corpus), "held_out", 32), 2 * MICRO * 3
    ids = torch.stack([held_out[index * len(held_out) // rows]["input_ids"] for index in range(rows)])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() == pytest.approx(evaluations(run)[-1]["loss"], rel=1e-5)
    report = run_forked("report", run.dump_dir).stdout
    assert re.search(r"groups alive +3, at least 3, 1 change, generation \d+\n", report), report
    assert re.search(r"group 1 on \S+ was lost after step \d+ \(.*\); the others went on after \S+ s\n", report), report


def test_without_losses_an_elastic_run_is_the_run_without_elastic_groups(start: Start) -> None:
    steps = 20
    elastic, plain = start(steps=steps), start("--set", "sdp.elastic.enabled=false", steps=steps)
    assert (elastic.end(), plain.end()) == (0, 0), elastic.said + plain.said
    losses = [[line["loss"] for line in run.lines()] for run in (elastic, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert [line["groups"] for line in elastic.lines()] == [4] * steps
    assert "groups" not in plain.lines()[0]
    evaluated = run_forked("evaluate", elastic.dump_dir, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(evaluations(elastic)[-1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_curves_and_a_mixture_go_on_when_their_writer_is_killed(start: Start, corpus: Path, tmp_path: Path) -> None:
    """Another group writes the curves, with the points that are missing. Each source keeps its
    share.
    """
    (tmp_path / "other").mkdir()
    other = make_corpus(tmp_path / "other", seed=1)
    sources = [{"path": str(corpus), "weight": 3}, {"path": str(other), "weight": 1}]
    words = ["--set", "data.path=null", "--set", f"data.sources={json.dumps(sources)}"]
    words += ["--set", "csv_monitor.enabled=true", "tensorboard.enabled=true"]
    run = start(*words, groups=3, settings={"capacity": 0.7}, restarts=3)
    run.wait_for(10, groups=3)
    run.lose(0, of=3)
    check_end(run)
    lines = run.lines()
    with (run.dump_dir / "csv" / "Train_Samples_train_loss.csv").open(newline="") as file:
        points = [(int(step), float(loss)) for step, loss in list(csv.reader(file))[1:]]
    assert points == [(line["step"], line["loss"]) for line in lines]
    shown = read_tensorboard(run.dump_dir / "tensorboard")
    assert shown == pytest.approx(dict(points), rel=1e-6)  # its values have 32 bits
    counts = lines[-1]["source_samples"]
    assert sum(counts.values()) == lines[-1]["samples"]
    assert max(counts.values()) == pytest.approx(0.75 * lines[-1]["samples"], rel=0.2)
    assert all(len(line["source_losses"]) == 2 for line in evaluations(run))


@pytest.mark.slow
def test_groups_with_batch_norms_are_killed_in_saves(tmp_path: Path) -> None:
    """Each save measures the statistics of batch norms with all groups before."""
    config = elastic_config(tmp_path, groups=3, restarts=10)
    config |= {
        "data": {"name": "digits"}, "model": {"name": "resnet18", "stem": "cifar", "width": 4},
        "zero_optimization": {"stage": 3}, "csv_monitor": {"enabled": True},
    }  # fmt: skip
    config["training"] |= {"evaluate_every": 0, "save_every": 1, "recalibrate_batches": 8}
    config["sdp"]["capacity"] = 0.8
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = ElasticRun(tmp_path / "config.json", tmp_path / "run", "--nproc", "6")
    try:
        run.wait_for(3, groups=3)
        for group in (2, 0, 1):
            run.lose(group, of=3)
        check_end(run, ranks=2)
    finally:
        run.kill()


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(start: Start, tmp_path: Path) -> None:
    steps = 40
    whole = start(steps=steps)
    assert whole.end() == 0, whole.said
    run = start("--set", "training.steps=15", steps=steps)
    assert run.end() == 0, run.said
    again = ElasticRun(tmp_path / "config.json", run.dump_dir, "--nproc", "4", "--resume")
    assert again.end() == 0, again.said
    check_lines(again.lines())
    assert [line["loss"] for line in again.lines()] == [line["loss"] for line in whole.lines()]
