"""A hundred kills in one run: nearly all attempted steps are committed, and holders stay equal."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from sdp.tests.support.clusters.elastic_runs import ElasticRun, elastic_config

KILLS, PAUSE_SECONDS = 100, 5.0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills(corpus: Path, tmp_path: Path) -> None:
    """Some group is killed every five seconds, but never before the last victim is back.

    Holders are compared after each step. A killed group costs the step that it was in.
    """
    config = elastic_config(corpus, restarts=1000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    run, draws = ElasticRun(tmp_path / "config.json", tmp_path / "run"), random.Random(0)
    try:
        run.wait_for(10, groups=4)
        for _ in range(KILLS):
            began = time.monotonic()
            run.lose(draws.randrange(4), of=4)
            time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - began)))
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["samples"] for line in lines][-1] == sum(2 * line["groups"] for line in lines)
    assert run.said.count(" joined after step ") == run.said.count(" was lost after step ") == KILLS
    assert len(lines) / (len(lines) + KILLS) >= 0.9
    assert lines[-1]["loss"] < 1.0
