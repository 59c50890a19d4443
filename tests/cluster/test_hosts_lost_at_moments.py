"""A host loses its link or its power at each moment of an elastic run.

Nobody is told: packets vanish. The groups that are left end with the weights of a run that has only
them. A host that was only cut off goes on alone, notices it, and ends.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.groups_on_hosts import GroupsOnHosts
from sdp.tests.support.clusters.hosts import HEARTBEAT, Hosts
from sdp.tests.support.clusters.moments import MOMENTS, REDUCTION, SAVE
from sdp.tests.support.clusters.stories import LINK, POWER, Checked, Story, check_files, run_to_the_moment

pytestmark = pytest.mark.cluster
ROUTINE = [(LINK, SAVE), (POWER, REDUCTION)]  # each waits for a heartbeat
OF_GROUPS = {LINK: "tsu", POWER: "stsu"}  # the lost groups are on host-s


@pytest.fixture(scope="module")
def static_runs(tmp_path_factory: Any) -> Checked:
    """Those that were made, because several tests compare with the same ones."""
    return Checked(lambda: tmp_path_factory.mktemp("static"))


@pytest.mark.parametrize(
    ("loss", "moment"),
    [
        pytest.param(loss, moment, marks=[] if (loss, moment) in ROUTINE else pytest.mark.slow)
        for loss in (LINK, POWER)
        for moment in MOMENTS
    ],
)
def test_nothing_is_lost_but_the_lost(
    hosts: Hosts, tmp_path: Path, static_runs: Checked, loss: str, moment: str
) -> None:
    story = Story(loss, moment)
    config = story.config(hosts.folder / "shards")
    make = partial(GroupsOnHosts, hosts, OF_GROUPS[loss])
    with run_to_the_moment(story, config, tmp_path, make) as (run, stop):
        assert isinstance(run, GroupsOnHosts)
        if loss == LINK:
            host = run.cut_link(stop)
            run.restore_link(host, stop)
            assert "was cut off" in run.said
        else:
            host = run.cut_power(stop)
        try:
            run.end(story.living[-1])
        finally:
            hosts.plug(host, "up")
        assert f"no heartbeat for {HEARTBEAT} s" in run.said
        check_files(run, story)
    static_runs.check(run, story, config)
