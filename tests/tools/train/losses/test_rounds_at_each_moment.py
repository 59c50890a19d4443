"""A loss at each moment of a run with local steps. The groups that are left end with the weights of
a run that has only them, from the round in which the others were lost. If these had voted for the
round, it is the next one.

All samples are the same, because these runs do not read them in the same order. Tests of samples
check the order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.data.prepare import prepare
from sdp.tests.support.cases import RELATIVE
from sdp.tests.support.clusters.elastic_runs import MICRO
from sdp.tests.support.clusters.lost_at import Living, SeparateGroups, StaticRuns, tensors_of
from sdp.tests.support.clusters.moments import (
    BEFORE_VOTE,
    EVALUATION,
    MOMENTS,
    OUTER_STEP,
    REDUCTION,
    RETURN,
    SAVE,
    UPDATE,
)
from sdp.tests.support.clusters.stories import (
    COORDINATOR,
    GROUP,
    LAST,
    RANK,
    STEPS,
    TWO_GROUPS,
    Story,
    run_to_the_moment,
    same_tensors,
)

EVERY = 2
SAMPLE = 40  # tokens
# These losses come at the end of a round, after step 4. Those in an update, an evaluation and a
# save come in the middle of a round, in step 3 or after it.
AT_THE_END = (REDUCTION, BEFORE_VOTE, OUTER_STEP)


class RoundStory(Story):
    """As :class:`Story`, but what a lost group learned in its last round does not count, except if
    it has voted.
    """

    def __init__(self, loss: str, moment: str):
        super().__init__(loss, moment)
        everyone = tuple(range(self.groups))
        left = tuple(group for group in everyone if group not in self.lost)
        counts = EVERY if moment != OUTER_STEP else 2 * EVERY
        self.step = LAST if moment not in AT_THE_END else 2 * EVERY
        self.living: Living = (everyone,) * counts + (left,) * (STEPS - counts)
        if self.returns is not None:  # it is lost before the first average, and back after the second one
            self.living = (everyone[:-1],) * (2 * EVERY) + (left,) * (STEPS - 2 * EVERY)
        if (loss, moment) == (COORDINATOR, OUTER_STEP):
            self.stops = everyone  # so all have heard that the others have voted

    def config(self, corpus: Path) -> dict[str, Any]:
        """Return the configuration. It has no momentum, because static runs with other groups
        cannot begin with the moments of single groups. ``tests/engine/elastic`` checks moments.
        """
        config = super().config(corpus)
        config["sdp"]["sync"] = {"every": EVERY}
        config["data"]["sequence_length"] = SAMPLE
        config["optimizer"]["params"]["momentum"] = 0.0
        return config


@pytest.fixture(scope="module")
def same_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of one document, again and again. With its end, it has the length of a sample.

    Another document is held out. Two ranks can share the 280 rows of the embedding.
    """
    folder = tmp_path_factory.mktemp("same")
    texts = "this one is held out", "sample 0: all groups read it in each step"
    (folder / "same.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" * 100 for text in texts))
    made = prepare(
        [str(folder / "same.jsonl")], folder / "shards", vocab_size=280, held_out=0.5, workers=1, progress=False
    )
    assert made["splits"]["train"]["tokens"] == SAMPLE * made["splits"]["train"]["documents"]
    return folder / "shards"


class Made:
    """Static runs that were made, because several tests compare with the same ones."""

    def __init__(self, folders: pytest.TempPathFactory):
        self._folders, self._runs = folders, dict[str, StaticRuns]()

    def runs_of(self, config: dict[str, Any], data_ranks: int) -> StaticRuns:
        """Return those of this configuration, without tensor parallelism."""
        static = {name: value for name, value in config.items() if name != "tensor_parallel"}
        key = json.dumps([static, data_ranks])
        if key not in self._runs:
            self._runs[key] = StaticRuns(self._folders.mktemp("static"), static, data_ranks)
        return self._runs[key]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


ROUTINE = [(RANK, EVALUATION), (TWO_GROUPS, SAVE), (GROUP, OUTER_STEP)]


@pytest.mark.parametrize(
    ("loss", "moment"),
    [
        pytest.param(loss, moment, marks=[] if (loss, moment) in ROUTINE else pytest.mark.slow)
        for loss in (RANK, GROUP, TWO_GROUPS, COORDINATOR)
        for moment in (*MOMENTS, OUTER_STEP)
    ],
)
def test_the_others_finish_their_round(same_samples: Path, tmp_path: Path, made: Made, loss: str, moment: str) -> None:
    story = RoundStory(loss, moment)
    _check(story, story.config(same_samples), tmp_path, made)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["tensor parallelism", "deepspeed", "backward masking"])
@pytest.mark.parametrize("moment", [*MOMENTS, OUTER_STEP])
def test_a_rank_is_lost_in_other_layouts(
    same_samples: Path, tmp_path: Path, made: Made, settings: str, moment: str
) -> None:
    story = RoundStory(RANK, moment)
    config = story.config(same_samples)
    if settings == "tensor parallelism":
        config |= {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": story.ranks}}
    else:
        config["sdp"] |= {"engine": "deepspeed"} if settings == "deepspeed" else {"masking": "backward"}
    _check(story, config, tmp_path, made)


def _check(story: RoundStory, config: dict[str, Any], folder: Path, made: Made) -> None:
    with run_to_the_moment(story, config, folder) as (run, stop):
        if story.loss == COORDINATOR:
            run.lose_coordinator(stop)
        else:
            run.lose_ranks(stop)
        run.end(story.living[-1])
        data_ranks = story.ranks // config.get("tensor_parallel", {}).get("autotp_size", 1)
        _check_files(run, story, data_ranks)
    expected = made.runs_of(config, data_ranks)
    everyone = (tuple(range(story.groups)),) * LAST
    losses = expected.losses(story.living)
    if story.moment not in (UPDATE, RETURN):  # all have told their losses before, and then a group is lost
        losses[LAST - 1] = expected.losses(everyone)[-1]
    assert [line["loss"] for line in run.lines("metrics.jsonl")] == pytest.approx(losses, rel=RELATIVE)
    checkpoints = run.dump_dir / "checkpoints"
    same_tensors(tensors_of(checkpoints, f"step-{STEPS}"), expected.checkpoint(story.living))
    saved = everyone if story.moment in AT_THE_END else story.living[:LAST]  # in the middle of a round
    same_tensors(tensors_of(checkpoints, f"step-{LAST}"), expected.checkpoint(saved))


def _check_files(run: SeparateGroups, story: RoundStory, data_ranks: int) -> None:
    """Each step and evaluation is there once, and each sample counts or is reported as skipped."""
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), run.said
    assert [line["step"] for line in run.lines("evaluations.jsonl")] == [0, LAST, STEPS]
    assert [line["step"] for line in lines if "outer_step" in line] == [2, 4, 6]
    names = sorted(path.name for path in (run.dump_dir / "checkpoints").iterdir())
    assert names == ["latest.json", f"step-{LAST}", f"step-{STEPS}"]
    learned = sum(map(len, story.living)) * data_ranks * MICRO
    assert lines[-1]["samples"] - lines[-1]["skipped_samples"] == learned, run.said
    steps = 2 if story.moment in (REDUCTION, BEFORE_VOTE) else 1 if story.moment in (UPDATE, EVALUATION, SAVE) else 0
    skipped = len(story.lost) * steps + (EVERY if story.returns is not None else 0)
    assert lines[-1]["skipped_samples"] == skipped * data_ranks * MICRO, run.said
    saved = json.loads((run.dump_dir / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())
    assert saved["loader"]["consumed"] == saved["global_samples"] == lines[-1]["samples"]
