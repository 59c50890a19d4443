"""Runs with local steps lose groups in the middle of a round. No step is lost, and every sample is
counted or reported as skipped.
"""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.elastic_runs import MICRO, ElasticRun, Start
from sdp.tests.support.processes import until

EVERY = 5
ROUNDS = {"sync": {"every": EVERY}}


def check_end(run: ElasticRun, ranks: int = 1) -> None:
    """The run ends at a signal, after a whole round, with all lines and a checkpoint."""
    assert run.stop() == 128 + signal.SIGTERM, run.said
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) % EVERY == 0
    learned = 0
    for line in lines:  # the groups of a line are those whose changes count
        learned += line["groups"] * ranks * MICRO
        if "outer_step" in line:
            assert line["samples"] - line["skipped_samples"] == learned
            assert line["outer_step"] * EVERY == line["step"]
    reported = sum(int(count) for count in re.findall(r"(\d+) samples of group", run.said))
    assert lines[-1]["skipped_samples"] == reported
    saved = json.loads((run.dump_dir / "checkpoints" / f"step-{len(lines)}" / "state.json").read_text())
    assert saved["loader"]["consumed"] == saved["global_samples"] == lines[-1]["samples"]
    assert saved["sync"].get("skipped_samples", 0) == reported
    assert all(line["loss"] < 7 for line in lines)


@pytest.mark.parametrize(
    "settings",
    [
        ROUNDS,
        pytest.param(
            {"sync": {"every": EVERY, "compression": "bf16", "offload": "cpu"}, "masking": "backward"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"sync": {"every": EVERY, "single_holder": "skip"}, "granularity": "neuron", "neuron_groups": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "bf16-offload", "neurons"],
)
def test_groups_are_killed_in_rounds_and_come_back(start: Start, settings: dict[str, Any]) -> None:
    """Holders are compared after each average."""
    draws = random.Random(5)
    run = start(settings=settings, restarts=10)
    run.wait_for(2 * EVERY, groups=4)
    for _ in range(2):
        run.lose(draws.randrange(4), of=4)
    check_end(run)
    assert run.said.count(" was lost after step ") == run.said.count(" joined after step ") == 2
    assert all(int(step) % EVERY == 0 for step in re.findall(r"joined after step (\d+)", run.said))


def test_without_losses_rounds_are_those_of_a_run_without_elastic_groups(start: Start) -> None:
    """Also of a round that the end of the run cuts short, and of evaluations inside rounds."""
    steps = 4 * EVERY + 2
    words = ["--set", "training.evaluate_every=4"]
    elastic = start(*words, settings=ROUNDS, steps=steps)
    plain = start(*words, "--set", "sdp.elastic.enabled=false", settings=ROUNDS, steps=steps)
    assert (elastic.end(), plain.end()) == (0, 0), elastic.said + plain.said
    for key in ("loss", "grad_norm", "lr", "samples", "skipped_steps"):
        found, expected = ([line[key] for line in run.lines()] for run in (elastic, plain))
        assert found == pytest.approx(expected, rel=1e-6), key
    for key in ("outer_step", "drift", "outer_grad_norm"):
        found, expected = ([line.get(key, -1) for line in run.lines()] for run in (elastic, plain))
        assert found == pytest.approx(expected, rel=1e-6), key
    evaluated = [
        [json.loads(line)["loss"] for line in (run.dump_dir / "evaluations.jsonl").read_text().splitlines()]
        for run in (elastic, plain)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)
    for run in (elastic, plain):
        for rank in json.loads((run.dump_dir / "summary.json").read_text())["ranks"]:
            assert rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]


@pytest.mark.slow
def test_a_checkpoint_inside_a_round_resumes_bit_for_bit(start: Start, tmp_path: Path) -> None:
    steps, save_every = 4 * EVERY, EVERY + 2
    words = ["--set", f"training.save_every={save_every}", "--set", f"training.steps={steps}"]
    whole = start(*words, settings=ROUNDS, steps=steps)
    assert whole.end() == 0, whole.said
    run = start(*words[:2], settings=ROUNDS, steps=steps)
    until(
        lambda: (run.dump_dir / "checkpoints" / f"step-{save_every}" / "state.json").exists(), seconds=120, pause=0.002
    )
    run.kill()
    again = ElasticRun(tmp_path / "config.json", run.dump_dir, "--nproc", "4", "--resume", *words)
    assert again.end() == 0, again.said
    assert re.search(r"resumed from .*step-(7|14)\n", again.said), again.said
    assert [line["loss"] for line in again.lines()] == [line["loss"] for line in whole.lines()]


@pytest.mark.slow
def test_a_group_that_hangs_in_a_round_is_cut_off_and_rejoins(start: Start) -> None:
    run = start(settings=ROUNDS, restarts=3, heartbeat_seconds=5)
    run.wait_for(2 * EVERY, groups=4)
    run.hit(0, signal.SIGSTOP)
    run.wait_for(EVERY, groups=3)
    assert "no heartbeat for 5 s" in run.said
    run.hit(0, signal.SIGCONT)
    run.wait_for(EVERY, groups=4)
    check_end(run)


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_a_rank_inside_a_sharded_group_is_killed_in_a_round(start: Start, masking: str) -> None:
    run = start(
        "--set", "zero_optimization.stage=3", groups=3, ranks=2,
        settings={"capacity": 0.7, "masking": masking} | ROUNDS, restarts=3,
    )  # fmt: skip
    run.wait_for(EVERY, groups=3)
    run.lose(2, of=3)
    check_end(run, ranks=2)


@pytest.mark.parametrize(("ranks", "masking"), [(1, "forward"), pytest.param(2, "backward", marks=pytest.mark.slow)])
def test_a_unit_without_a_living_holder_comes_back_from_the_newest_checkpoint(
    start: Start, ranks: int, masking: str
) -> None:
    """The others wait for the group that holds it, and give up what they learned in the round."""
    settings = {"survive": 0, "profile": [4, 3, 2, 1], "masking": masking} | ROUNDS
    run = start("--set", f"zero_optimization.stage={3 * (ranks > 1)}", ranks=ranks, settings=settings, restarts=3)
    run.wait_for(45, groups=4)  # a checkpoint is written after step 40
    (holder,) = json.loads((run.dump_dir / "placement.json").read_text())["holders"][3]
    run.hit(holder, signal.SIGKILL)
    until(lambda: "restart 1 of 3" in run.said, seconds=120, pause=0.05)
    run.wait_for(3 * EVERY, groups=4)
    assert run.stop() == 128 + signal.SIGTERM, run.said
    said, lines = run.said, run.lines()
    assert "no living group holds 'model.layers.3' (1 of 4 units); the others wait 60 s for one at most" in said
    age = re.search(
        rf"group {holder} brings 'model.layers.3' \(1 units\) back from a checkpoint, (\d+) steps old", said
    )
    assert age is not None
    assert 0 < int(age[1]) <= 40
    skipped = re.search(
        r"(\d+) samples of groups 0, 1, 2, 3 in the (\d+) steps of an unfinished round are skipped", said
    )
    samples, steps = map(int, skipped.groups() if skipped else (0, 0))  # none if it was between two rounds
    assert samples == steps * 4 * ranks * MICRO == lines[-1]["skipped_samples"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) % EVERY == 0
    without = [line["step"] for line in lines if line["step"] % EVERY == 0 and "outer_step" not in line]
    assert len(without) == (steps > 0), "the round that all gave up has no average"
    assert all(line["loss"] < 7 for line in lines)
