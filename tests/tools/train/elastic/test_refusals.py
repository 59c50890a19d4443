"""What elastic groups cannot do yet is one line, before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sdp.tests.support.clusters.elastic_runs import elastic_config
from sdp.tools.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sdp.engine=reference",), "sdp.engine: reference is not available in this version together with sdp.elastic"),
        (("sdp.engine=deepspeed", "fp16.enabled=true"), "fp16.enabled: true is not available"),
        (("sdp.groups=1", "sdp.survive=0"), "sdp.groups: 1 is not available"),
        (("sdp.group_sizes=[1, 1, 1, 2]",), "sdp.group_sizes: groups of unequal size"),
        (("data.path=null",), "data.path: null is not available"),
        (("training.tokens=1000", "training.steps=null"), "training.tokens: 1000 is not available"),
        (("training.evaluate_tasks={\"tasks\": [\"piqa\"]}",), "training.evaluate_tasks: tasks is not available"),
        (("training.noise_scale_interval=5",), "training.noise_scale_interval: 5 is not available"),
        (("training.async_save=true",), "training.async_save: true is not available"),
        (("training.on_spike=rollback",), 'training.on_spike: rollback is not available'),
        (("training.on_spike=stop",), 'training.on_spike: stop is not available'),
        (("sdp.elastic.min_groups=5",), "sdp.elastic.min_groups: 5 is more than sdp.groups = 4; use at most 4"),
        (
            ("sdp.elastic.min_groups=2",),
            "sdp.elastic.min_groups: with 2 of 4 groups, a unit may have no holder, because sdp.survive = 1 allows "
            "only 1 to be absent; use 3, or raise sdp.survive to 2",
        ),
        (("sdp.sync={\"every\": 4, \"overlap\": 1}",), "sdp.sync.overlap: 1 is not available"),
        (("sdp.sync={\"every\": 4, \"fragments\": 2}",), "sdp.sync.fragments: 2 is not available"),
        (("sdp.sync={\"every\": 4, \"start_after\": 2}",), "sdp.sync.start_after: 2 is not available"),
        (("sdp.sync={\"every\": 4, \"compression\": \"int8\"}",), 'sdp.sync.compression: int8 is not available'),
    ],
)  # fmt: skip
def test_settings_are_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    said = refused(corpus, tmp_path, capsys, *(word for each in words for word in ("--set", each)))
    assert message in said


def test_cuda_and_a_profile_are_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(corpus, tmp_path, capsys, "--profile", "3-4")
    assert "--profile: is not available in this version together with sdp.elastic; leave it out" in said
    monkeypatch.setattr("sdp.launcher.degrees.visible_devices", lambda: 1)
    assert "sdp.elastic: was never run with CUDA" in refused(corpus, tmp_path, capsys)


def refused(corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line with which a run is refused."""
    config = folder / "config.json"
    config.write_text(json.dumps(elastic_config(corpus)))
    assert main(["train", str(config), "--dump-dir", str(folder / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert not (folder / "run").exists()
    return said
