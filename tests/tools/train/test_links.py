"""Links that somebody put into the dump directory are not followed when a run writes there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import CheckpointError
from sdp.tools.shared.files import WriteError
from sdp.tools.train.checkpointer import Checkpointer
from sdp.tools.train.log_file import LogFile
from sdp.tools.train.observers.monitors import open_monitors


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/latest.json"])
def test_a_link_among_the_checkpoints_is_refused(tmp_path: Path, link: str) -> None:
    saved: list[Any] = []
    engine: Any = SimpleNamespace(
        global_steps=1,
        config=SimpleNamespace(training=SimpleNamespace(save_timeout=1.0, keep=1)),
        gather_facts=lambda facts: [facts],
        save_checkpoint=lambda *_, **__: saved.append(1),
    )
    beat: Any = SimpleNamespace(at=lambda *_: None)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(elsewhere)
    checkpointer = Checkpointer(engine, run, {}, contextlib.nullcontext, beat)
    with pytest.raises(CheckpointError, match=rf"{link}: is a symbolic link, which a run does not follow"):
        checkpointer.write()
    assert not saved
    (run / link).unlink()
    checkpointer.write()
    assert saved


def test_a_link_in_place_of_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "precious")
    with pytest.raises(WriteError, match=r"rank-0\.log: is a symbolic link"):
        LogFile(tmp_path / "rank-0.log")
    assert not (tmp_path / "precious").exists()


def test_a_link_in_place_of_a_curve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "Train_Samples_lr.csv").symlink_to(tmp_path / "precious")
    monitors = open_monitors(load_config({"csv_monitor": {"enabled": True}, "sdp": {"groups": 1}}), tmp_path)
    with pytest.raises(WriteError, match=r"Train_Samples_lr\.csv: is a symbolic link"):
        monitors.write(1, {"Train/Samples/lr": 0.1})
    assert not (tmp_path / "precious").exists()
