"""Two hosts of an elastic run lose each other, but both reach the coordinator and all others.

Nobody looks lost, so no group is cut off. The run waits, and goes on when the network is repaired.
"""

import time
from pathlib import Path

import pytest
from sdp.tests.support.cases import RELATIVE
from sdp.tests.support.clusters.groups_on_hosts import GroupsOnHosts
from sdp.tests.support.clusters.hosts import Hosts
from sdp.tests.support.clusters.lost_at import StaticRuns
from sdp.tests.support.clusters.moments import REDUCTION, Stop
from sdp.tests.support.clusters.stories import LAST, LINK, STEPS, Story, same_tensors, tensors_of

pytestmark = pytest.mark.cluster
LIMIT = 8  # seconds of a step
EVERYONE = ((0, 1, 2),) * STEPS


def test_the_run_goes_on_when_they_reach_each_other_again(hosts: Hosts, tmp_path: Path) -> None:
    story = Story(LINK, REDUCTION)
    config = story.config(hosts.folder / "shards")
    config["training"]["step_timeout"] = LIMIT
    stop = Stop(REDUCTION, (1,), 1, LAST, tmp_path)
    with GroupsOnHosts(hosts, "tsu", tmp_path, config, story.ranks, [stop]) as run:
        run.wait_for(stop)
        with hosts.parted("t", "s"):
            stop.go_on()
            time.sleep(3 * LIMIT)  # longer than a rank may go without progress
            assert len(run.lines("metrics.jsonl")) == LAST - 1, run.said
        run.end([0, 1, 2])
        lines = run.lines("metrics.jsonl")
        assert "was lost after step" not in run.said
        assert "groups 0, 1, 2 try again, because group" in run.said
    assert [line["groups"] for line in lines] == [3] * STEPS
    generations = [line["generation"] for line in lines]
    assert generations[: LAST - 1] == [1] * (LAST - 1)
    assert min(generations[LAST - 1 :]) > 2, "they met more than once"
    folder = tmp_path / "static"
    folder.mkdir()
    static = StaticRuns(folder, config, story.ranks)
    assert [line["loss"] for line in lines] == pytest.approx(static.losses(EVERYONE), rel=RELATIVE)
    same_tensors(tensors_of(run.dump_dir / "checkpoints", f"step-{STEPS}"), static.checkpoint(EVERYONE))
