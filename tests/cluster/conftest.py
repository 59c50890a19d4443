"""The hosts that all tests here share, and what an undisturbed run on one of them comes to."""

from collections.abc import Iterator

import pytest
from hosts import SDP, Hosts, made_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """host-a to host-d; see tests/hosts.py."""
    with made_hosts() as made:
        yield made


@pytest.fixture(scope="session")
def expected(hosts: Hosts) -> list[float]:
    """The losses of the local start on four ranks."""
    return hosts.run(*SDP, "launch", "--launcher", "local", "--gpus-per-node", "4", "small.json", "--dump-dir", "local")
