"""Elastic groups on four hosts, each with a launch of its own, by four launchers.

See tests/support/clusters/elastic_hosts.py.
"""

from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.hosts import needs

pytestmark = pytest.mark.cluster


def test_hosts_whose_links_processes_and_coordinator_are_lost_one_after_the_other(lost_groups: Future[None]) -> None:
    for launcher in ("deepspeed", "Open MPI"):
        needs(launcher)
    lost_groups.result()
