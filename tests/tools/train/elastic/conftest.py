"""Runs with elastic groups, which end with the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.clusters.elastic_runs import MANY, ElasticRun, Start, elastic_config


@pytest.fixture
def start(corpus: Path, tmp_path: Path) -> Iterator[Start]:
    runs: list[ElasticRun] = []

    def begin(
        *more: str,
        steps: int = MANY,
        groups: int = 4,
        ranks: int = 1,
        settings: dict[str, Any] | None = None,
        new_interpreters: bool = False,
        prepare: Callable[[], object] | None = None,
        **elastic: float,
    ) -> ElasticRun:
        config = elastic_config(corpus, steps=steps, groups=groups, **elastic)
        config["sdp"] |= settings or {}
        if "placement" in config["sdp"] or "profile" in config["sdp"]:
            del config["sdp"]["capacity"]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        words = ["--nproc", str(groups * ranks), *more]
        folder = tmp_path / f"run-{len(runs)}"
        runs.append(ElasticRun(path, folder, *words, new_interpreters=new_interpreters, prepare=prepare))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
