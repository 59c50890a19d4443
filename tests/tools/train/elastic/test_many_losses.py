"""A hundred kills in one run: nearly all attempted steps are committed, and holders stay equal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sdp.tests.scripts.elastic_losses import measure, table, write_config

KILLS, HANGS, HEARTBEAT = 100, 5, 10.0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills(corpus: Path, tmp_path: Path) -> None:
    """Some group is killed every five seconds, but never before the last victim is back.

    Holders are compared after each step. A killed group costs the step that it was in. Seconds are
    printed and not judged, because other programs may run. docs/elastic.md has those of one run.
    """
    found = measure(write_config(tmp_path, corpus, HEARTBEAT), tmp_path / "run", kills=KILLS, hangs=HANGS)
    print(table(found, HEARTBEAT))
    assert found["exit_code"] == 128 + signal.SIGTERM
    assert found["lost"] == found["joined"] == KILLS + HANGS
    assert found["share_committed"] >= 0.9
    assert found["loss"] < 1.0
