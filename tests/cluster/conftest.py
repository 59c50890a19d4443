"""The hosts that all tests here share, and the losses of undisturbed runs on one of them."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sdp.tests.support.clusters.faults import LAUNCHERS, Life, live
from sdp.tests.support.clusters.hosts import LAUNCH, QUICKSTART, SDP, Hosts, made_hosts, what_installs
from sdp.tests.support.clusters.slurm_scenarios import STORIES, slurm_over, what_is_missing


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """host-a to host-l; see tests/support/clusters/hosts.py."""
    with made_hosts() as made:
        yield made


@pytest.fixture(scope="session")
def local(hosts: Hosts) -> Iterator[dict[str, Future[list[float]]]]:
    """Losses of two local runs: the small run on two ranks, the quickstart on four."""
    with ThreadPoolExecutor(1) as pool:
        small = [*LAUNCH, "--launcher", "local", "--gpus-per-node", "2", "small.json", "--dump-dir", "local"]
        yield {
            "small": pool.submit(hosts.run, *small),
            "quickstart": pool.submit(hosts.run, *SDP, "train", *QUICKSTART, "local quickstart"),
        }


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[object]:
    """Return the values that this session's tests have for a parameter."""
    calls = (
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    )
    return {call.params.get(parameter) for call in calls}


@pytest.fixture(scope="session")
def lives(
    hosts: Hosts, local: dict[str, Future[list[float]]], request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[str]]]:
    """Disturbed runs under the launchers that the session tests, two at a time.

    They run during other tests, because they mostly wait for timeouts. Each has its own host for
    rank 1.
    """
    wanted = asked_for(request, "torn")
    with ThreadPoolExecutor(2) as pool:
        begun = {}
        for place, (name, launcher) in enumerate(LAUNCHERS.items()):
            if name in wanted and what_installs(name) is None:
                begun[name] = pool.submit(
                    live, Life(hosts, f"life-{place}", launcher, "efghi"[place], 29600 + place), local["small"]
                )
        yield begun


@pytest.fixture(scope="session")
def stories(
    hosts: Hosts, local: dict[str, Future[list[float]]], request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[None]]]:
    """The scenarios for SLURM that the session tests, two at a time, because they mostly wait.

    There are none if SLURM is not installed.
    """
    wanted = [story for story in STORIES if story.__name__ in asked_for(request, "story")]
    if not wanted or what_is_missing():
        yield {}
        return
    with slurm_over(hosts) as slurm, ThreadPoolExecutor(2) as pool:
        yield {story.__name__: pool.submit(story, slurm, local["small"]) for story in wanted}
