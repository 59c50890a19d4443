"""A wait for the lock of a compiler, which a killed process may have left, is told."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from sdp.engine.environment import process


def test_a_lock_that_was_left_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "sdp"):
        with process.announced(process.compiler_locks):
            time.sleep(0.5)
        assert not caplog.records, "nothing is compiled"
        lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 600, time.time() - 600))
        with process.announced(process.compiler_locks):
            pass
        assert not caplog.records, "the wait was short"
        with process.announced(process.compiler_locks):
            time.sleep(0.5)
    (record,) = caplog.records
    assert f"{lock} (10 minutes old); if no process compiles it, remove the lock" in record.getMessage()
