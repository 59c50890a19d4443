"""Groups on several hosts, whose anchors a service on another host keeps."""

import time

import pytest
from sdp.tests.support.clusters.hosts import Hosts
from sdp.tests.support.clusters.served import ServedRun

pytestmark = pytest.mark.cluster


def test_a_group_whose_link_is_cut_is_dropped_and_comes_back(hosts: Hosts) -> None:
    run = ServedRun(hosts, "cut", 29800)
    groups = [hosts.start(*run.group, f"cut-{host}", log=f"cut-{host}.log", host=host) for host in "jk"]
    run.reach(groups=2)
    hosts.plug("k", "down")
    try:
        time.sleep(20)
    finally:
        hosts.plug("k", "up")
    run.reach(groups=2)
    assert "made no request for" in run.said()
    assert any(line["groups"] == 1 for line in run.rounds())
    run.check_end(groups)
