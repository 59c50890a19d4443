"""The hosts that all tests here share, and what undisturbed runs on one of them come to."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hosts import LAUNCH, QUICKSTART, SDP, Hosts, made_hosts, what_installs
from lives import LAUNCHERS, Life, live


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """host-a to host-i; see tests/hosts.py."""
    with made_hosts() as made:
        yield made


@pytest.fixture(scope="session")
def expected(hosts: Hosts) -> list[float]:
    """The losses of the small run, local, on two ranks."""
    return hosts.run(*LAUNCH, "--launcher", "local", "--gpus-per-node", "2", "small.json", "--dump-dir", "local")


@pytest.fixture(scope="session")
def quickstart(hosts: Hosts) -> list[float]:
    """The losses of some steps of the quickstart, local, on four ranks."""
    return hosts.run(*SDP, "train", *QUICKSTART, "local quickstart")


@pytest.fixture(scope="session")
def lives(hosts: Hosts, expected: list[float]) -> Iterator[dict[str, Future[str]]]:
    """Two at a time beside the other tests: they wait for time-outs. Each has a host of its own for its rank 1."""
    with ThreadPoolExecutor(2) as pool:
        begun = {}
        for place, (name, launcher) in enumerate(LAUNCHERS.items()):
            if what_installs(name) is None:
                begun[name] = pool.submit(live, Life(hosts, f"life-{place}", launcher, "efghi"[place], 29600 + place), expected)
        yield begun
