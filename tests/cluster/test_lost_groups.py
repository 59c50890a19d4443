"""Elastic groups on several hosts, each with a launch of its own, by four launchers.

See tests/support/clusters/elastic_hosts.py.
"""

from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.elastic_hosts import (
    ENGINES,
    groups_of_two_ranks_lose_one,
    groups_on_two_hosts_lose_one,
    the_coordinators_host_is_cut_off,
)
from sdp.tests.support.clusters.hosts import Hosts, needs

pytestmark = pytest.mark.cluster


def test_hosts_whose_links_processes_and_coordinator_are_lost_one_after_the_other(lost_groups: Future[None]) -> None:
    for launcher in ("deepspeed", "Open MPI"):
        needs(launcher)
    lost_groups.result()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_launch_that_loses_one_of_two_ranks_and_a_number_that_another_host_takes_over(
    hosts: Hosts, engine: str
) -> None:
    for launcher in ("deepspeed", "Open MPI"):
        needs(launcher)
    groups_of_two_ranks_lose_one(hosts, engine)


@pytest.mark.slow
def test_groups_that_span_two_hosts_lose_a_rank_and_a_link(hosts: Hosts) -> None:
    for launcher in ("deepspeed", "Open MPI"):
        needs(launcher)
    groups_on_two_hosts_lose_one(hosts)


@pytest.mark.slow
def test_the_host_of_the_coordinator_loses_its_link(hosts: Hosts) -> None:
    the_coordinators_host_is_cut_off(hosts)
