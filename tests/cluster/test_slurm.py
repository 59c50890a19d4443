"""SLURM over hosts in network namespaces; see tests/support/clusters/slurm_scenarios.py.

Skipped, loudly, where a machine cannot make the hosts or has no SLURM.
"""

from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.slurm_scenarios import STORIES, what_is_missing

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
def test_slurm(stories: dict[str, Future[None]], story: str) -> None:
    if missing := what_is_missing():
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install slurm-wlm munge")
    stories[story].result()
