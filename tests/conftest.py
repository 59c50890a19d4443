"""Fixtures of all tests: the pool of ranks, and the folder of the modules that ranks import."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from sdp.tests.support.ranks import RankPool

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell has it for its background jobs, and for what those start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight processes at most, started when first needed."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()
