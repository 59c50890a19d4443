"""Without ``sdp.elastic`` a run has nothing of it: no coordinator, no session, no vote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.process_groups import AbortableGroup
from sdp.engine.elastic.session import Session
from sdp.tests.support.clusters.elastic_runs import ElasticRun, elastic_config

STEPS = 8


def forbid() -> None:
    """Let each of them raise in this process, and in those that it forks."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"a {type(self).__name__} in a run without elastic groups")

    for kind in (Coordinator, CoordinatorClient, Session, AbortableGroup):
        kind.__init__ = refuse  # type: ignore[method-assign]


def run_to_the_end(corpus: Path, folder: Path, *, is_elastic: bool) -> tuple[int, ElasticRun]:
    config = elastic_config(corpus, steps=STEPS)
    config["sdp"]["elastic"]["enabled"] = is_elastic
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    run = ElasticRun(path, folder / "run", "--nproc", "4", prepare=forbid)
    try:
        return run.end(), run
    finally:
        run.kill()


def test_a_run_without_elastic_groups_has_nothing_of_them(corpus: Path, tmp_path: Path) -> None:
    status, run = run_to_the_end(corpus, tmp_path, is_elastic=False)
    assert status == 0, run.said
    assert len(run.lines()) == STEPS


def test_a_run_with_them_would_notice(corpus: Path, tmp_path: Path) -> None:
    """So the test above can fail."""
    status, run = run_to_the_end(corpus, tmp_path, is_elastic=True)
    assert status != 0
    assert "in a run without elastic groups" in run.said
