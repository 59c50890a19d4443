"""Runs lose the only group that holds a unit. The others wait for it. If it does not come, they end
with a checkpoint of what lives.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint.load import load
from sdp.engine.checkpoint.storage.dcp import SafeReader
from sdp.engine.checkpoint.storage.directory import latest
from sdp.tests.support.clusters.elastic_runs import ElasticRun, Start
from sdp.tests.support.clusters.lost_at import SeparateGroups
from sdp.tests.support.clusters.moments import BEFORE_VOTE, Stop
from sdp.tests.support.clusters.stories import GROUP, LAST, Story
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ALONE = {"survive": 0, "profile": [4, 3, 2, 1]}  # the last unit has one holder


def holder_alone(run: ElasticRun) -> int:
    """The only group that holds the last unit."""
    (holder,) = json.loads((run.dump_dir / "placement.json").read_text())["holders"][3]
    return holder


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_unit_without_a_living_holder_comes_back_from_the_newest_checkpoint(start: Start, engine: str) -> None:
    """The others wait for the group that holds it."""
    run = start("--set", "zero_optimization.stage=2", settings=ALONE | {"engine": engine}, restarts=3)
    run.wait_for(45, groups=4)  # a checkpoint is written after step 40
    holder, lines = holder_alone(run), len(run.lines())
    run.hit(holder, signal.SIGKILL)
    run.wait_for(5, groups=4)
    assert run.stop() == 128 + signal.SIGTERM, run.said
    said = run.said
    assert "no living group holds 'model.layers.3' (1 of 4 units); the others wait 60 s for one at most" in said
    found = re.search(
        rf"group {holder} brings 'model.layers.3' \(1 units\) back from a checkpoint, (\d+) steps old", said
    )
    assert found is not None
    assert 0 < int(found[1]) < 40
    assert {line["groups"] for line in run.lines()[lines:]} == {4}


@pytest.mark.parametrize("case", ["it does not return", "no checkpoint"])
def test_the_run_ends_if_a_unit_has_no_living_holder(start: Start, case: str) -> None:
    run = start(settings=ALONE, restarts=int(case == "no checkpoint"))
    run.wait_for(5 if case == "no checkpoint" else 45, groups=4)
    run.hit(holder_alone(run), signal.SIGKILL)
    assert run.end() == 1, run.said
    why = {
        "it does not return": "no group that holds it will return",
        "no checkpoint": "there is no checkpoint to bring it back from",
    }[case]
    assert f"no living group holds 'model.layers.3' (1 of 4 units), and {why}" in run.said
    assert run.said.count("restart 1 of") <= 1
    assert (run.dump_dir / "checkpoints").exists() == (case == "it does not return")


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ALONE),
        pytest.param(2, ALONE | {"masking": "backward"}, marks=pytest.mark.slow),
        pytest.param(
            1, {"survive": 0, "capacity": 0.4, "granularity": "neuron", "neuron_groups": 4}, marks=pytest.mark.slow
        ),
        pytest.param(1, ALONE | {"sync": {"every": 6}}, marks=pytest.mark.slow),
        pytest.param(2, ALONE | {"sync": {"every": 6}, "masking": "backward"}, marks=pytest.mark.slow),
        pytest.param(2, ALONE | {"engine": "deepspeed"}, marks=pytest.mark.slow),
        pytest.param(1, ALONE | {"engine": "deepspeed", "sync": {"every": 6}}, marks=pytest.mark.slow),
    ],
)
def test_the_last_checkpoint_has_what_lives_and_the_lost_unit_of_the_one_before(
    start: Start, tmp_path: Path, ranks: int, settings: dict[str, Any]
) -> None:
    """The run goes on from it with all groups."""
    words = ["--set", f"zero_optimization.stage={3 * (ranks > 1)}"]
    run = start(*words, ranks=ranks, settings=settings, restarts=0)
    run.wait_for(50, groups=4)  # a checkpoint is written after step 40
    placement = json.loads((run.dump_dir / "placement.json").read_text())
    index = next(index for index, holders in enumerate(placement["holders"]) if len(holders) == 1)
    run.hit(placement["holders"][index][0], signal.SIGKILL)
    assert run.end() == 1, run.said
    found = re.search(r"wrote \S+step-(\d+); in it, '([^']+)' \(\d+ units\) is (\d+) steps older", run.said)
    assert found is not None, run.said
    last, age = int(found[1]), int(found[3])
    checkpoints = run.dump_dir / "checkpoints"
    before, after = (_tensors(checkpoints / f"step-{step}") for step in (last - age, last))
    same = {key for key in before if key.startswith("model/") and torch.equal(before[key], after[key])}
    assert before.keys() == {key for key in after if not key.startswith("random/")} or "sync" in settings
    if "granularity" not in settings:
        unit = placement["units"][index]
        assert same == {key for key in before if key.startswith(f"model/{unit}.")}
    again = ElasticRun(
        tmp_path / "config.json", run.dump_dir, "--nproc", str(4 * ranks), "--resume", *words,
        "--set", f"training.steps={last + 12}",
    )  # fmt: skip
    assert again.end() == 0, again.said
    assert f"resumed from {checkpoints / f'step-{last}'}" in again.said
    assert [line["step"] for line in again.lines()][last:] == list(range(last + 1, last + 13))
    assert all(line["loss"] < 5 for line in again.lines()[last:])


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_damaged_checkpoint_does_not_stop_the_end_of_the_run(start: Start, restarts: int) -> None:
    """A holder that is started again cannot load it. That ends this group, and not the others."""
    run = start(settings=ALONE, restarts=restarts)
    run.wait_for(45, groups=4)
    holder, checkpoint = holder_alone(run), run.dump_dir / "checkpoints" / "step-40"
    for file in checkpoint.glob("__*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    run.hit(holder, signal.SIGKILL)
    assert run.end() == 1, run.said
    assert "no group that holds it will return; no further checkpoint: " in run.said
    refused = rf"group {holder} cannot bring 'model.layers.3' \(1 units\) back: .*step-40.*; it is not started again"
    assert bool(re.search(refused, run.said)) == bool(restarts), run.said
    assert [path.name for path in checkpoint.parent.glob("*step-*")] == ["step-40"]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by key, without random numbers."""
    reader = SafeReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("random/")
    }
    load(checkpoint, tensors, {}, alone=True)
    return tensors


def test_the_others_end_when_nobody_came_in_time(corpus: Path, tmp_path: Path) -> None:
    """The only holder of a unit may return, as far as the coordinator knows, so the others wait.

    It is lost in step 4, and the last checkpoint is from step 2. So they write one of step 3 before
    they end.
    """
    story = Story(GROUP, BEFORE_VOTE)
    config = story.config(corpus)
    config["sdp"]["placement"]["model.layers.3"] = [*story.lost]
    config["sdp"]["elastic"]["wait_seconds"] = 4
    config["training"]["save_every"] = LAST - 1
    stop = Stop(BEFORE_VOTE, story.stops, 0, LAST + 1, tmp_path)
    with SeparateGroups(tmp_path, config, 1, [stop]) as run:
        run.wait_for(stop)
        run.lose_ranks(stop)
        left = [group for group in range(story.groups) if group not in story.lost]
        assert run.codes(left) == [1] * len(left), run.said
    assert "no living group holds 'model.layers.3' (1 of 4 units), and none came within 4 s" in run.said
    checkpoints = run.dump_dir / "checkpoints"
    assert latest(checkpoints) == f"step-{LAST}"
    assert (checkpoints / f"step-{LAST - 1}").is_dir()
