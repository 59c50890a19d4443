"""Links in the dump directory are not followed, and what was removed stays so."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sdp.engine.errors import CheckpointError, LaunchError, WriteError
from sdp.engine.files import open_own_file
from sdp.launcher.cluster import slurm
from sdp.launcher.local import start_local
from sdp.tools.train.loop.checkpointer import Checkpointer
from sdp.tools.train.process import LogFile
from sdp.tools.train.profiler import StepProfiler


def make_checkpointer(run: Path) -> tuple[Checkpointer, list[Path]]:
    """Return a Checkpointer for ``run``, and where its engine was asked to save."""
    saved: list[Path] = []
    settings = SimpleNamespace(
        start_timeout=1.0, save_timeout=1.0, keep=1, keep_every=None, max_failed_saves=3, async_save=False
    )
    engine: Any = SimpleNamespace(
        global_steps=1,
        global_rank=0,
        config=SimpleNamespace(training=settings),
        world_size=1,
        save_checkpoint=lambda directory, **_: saved.append(directory),
        wait_for_checkpoint=lambda **_: None,
    )
    return Checkpointer(
        engine, run, run / "checkpoints", {}, contextlib.nullcontext, cast(Any, SimpleNamespace(at=lambda *_: None))
    ), saved


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/latest.json"])
def test_a_link_among_the_checkpoints_is_refused(tmp_path: Path, link: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(elsewhere)
    checkpointer, saved = make_checkpointer(run)
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


@pytest.mark.parametrize("reader", [False, True])
def test_a_fifo_in_place_of_a_launchers_file_is_refused_without_a_hang(tmp_path: Path, reader: bool) -> None:
    path = tmp_path / "rank-1.log"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader else None
    with pytest.raises((WriteError, OSError), match=r"not a regular file|No such device"):
        open_own_file(path)
    if reading is not None:
        os.close(reading)


def profile_one_step(directory: Path, before_the_end: Callable[[], None]) -> None:
    profiler = StepProfiler(1, 1, directory, torch.device("cpu"), records=True)
    with profiler.around_step(1):
        before_the_end()
    profiler.on_step({})


def test_a_link_in_place_of_a_profile_is_refused(tmp_path: Path) -> None:
    def plant() -> None:
        (tmp_path / "profile" / "rank-0-trace.json.gz").symlink_to(tmp_path / "precious")

    for action in (plant, lambda: None):  # the link appears during the profile, and is there before it
        with pytest.raises(WriteError, match=r"rank-0-trace\.json\.gz: is a symbolic link"):
            profile_one_step(tmp_path / "profile", action)
    assert not (tmp_path / "precious").exists()


def test_a_profile_does_not_make_a_removed_run_again(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"profile: cannot be written"):
        profile_one_step(tmp_path / "removed" / "profile", lambda: None)
    (tmp_path / "run").mkdir()
    with pytest.raises(WriteError, match=r"profile: cannot be written"):
        profile_one_step(tmp_path / "run" / "profile", lambda: shutil.rmtree(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("link", ["logs", "logs/rank-1.log"])
def test_the_launcher_follows_no_link_among_the_logs(tmp_path: Path, link: str) -> None:
    logs, elsewhere = tmp_path / "run" / "logs", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run" / link).parent.mkdir(parents=True)
    (tmp_path / "run" / link).symlink_to(elsewhere / ("" if link == "logs" else "precious"))
    with pytest.raises(WriteError, match=rf"{link}: is a symbolic link"):
        start_local([], 2, logs, command=["/bin/sh", "-c", "echo output"])
    assert not [*elsewhere.iterdir()]


@pytest.mark.parametrize("link", ["slurm", "slurm/job.sh", "slurm/events"])
def test_a_job_follows_no_link(tmp_path: Path, link: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(elsewhere / ("" if link == "slurm" else "precious"))
    with pytest.raises(WriteError, match=rf"{link}: is a symbolic link"):
        slurm.submit("text", run)
    assert not [*elsewhere.iterdir()]


def test_a_job_in_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(LaunchError, match=r"slurm: cannot be written \(Not a directory\)"):
        slurm.submit("text", tmp_path / "run")


def test_a_removed_directory_of_checkpoints_is_not_made_again(tmp_path: Path) -> None:
    checkpointer, saved = make_checkpointer(tmp_path)
    checkpointer.save()
    assert len(saved) == 1
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(CheckpointError, match=r"checkpoints: was removed while the run was writing to it; make it"):
        checkpointer.write()
    checkpointer.save()  # a warning
    assert len(saved) == 1 and not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    checkpointer.save()
    assert len(saved) == 2


def test_a_removed_run_is_not_made_again_by_a_save(tmp_path: Path) -> None:
    checkpointer, saved = make_checkpointer(tmp_path / "run")
    with pytest.raises(WriteError, match=r"run: was removed while the run was writing to it"):
        checkpointer.save()
    assert not saved and not (tmp_path / "run").exists()
