"""A folder with a run and a hostfile."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a run's file and a hostfile, and no variables of a launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that whatever the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "run.json").write_text(json.dumps({"train_batch_size": 24, "sdp": {"groups": 2, "capacity": 0.5}}))
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    return tmp_path
