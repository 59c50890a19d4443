"""Runs with elastic groups, which end with the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
        **elastic: float,
    ) -> ElasticRun:
        config = elastic_config(corpus, steps=steps, groups=groups, **elastic)
        config["sdp"] |= settings or {}
        if "placement" in config["sdp"] or "profile" in config["sdp"]:
            del config["sdp"]["capacity"]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        words = ["--nproc", str(groups * ranks), *more]
        runs.append(ElasticRun(path, tmp_path / f"run-{len(runs)}", *words, new_interpreters=new_interpreters))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
