"""A full disk is one line, which names the newest checkpoint if the run ends."""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sdp.engine.environment.detect import Supervision
from sdp.engine.errors import WriteError
from sdp.launcher.fatal_errors import report_fatal
from sdp.tests.support.small_runs import read_metrics, write_config
from sdp.tools.cli import main
from sdp.tools.train.failures import explained
from sdp.tools.train.process import LogFile


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_write_error_that_names_the_newest_checkpoint(tmp_path: Path, number: int) -> None:
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    full = OSError(number, "no room", "events.out")
    for error, start in (
        (full, "events.out: cannot be written"),
        (WriteError("metrics.jsonl: full"), "metrics.jsonl: f"),
    ):
        with pytest.raises(WriteError) as found, explained(cast(Any, None), cast(Any, None), tmp_path / "checkpoints"):
            raise error
        assert str(found.value).startswith(start)
        assert str(found.value).endswith(f"; the newest checkpoint: {tmp_path}/checkpoints/step-4")
        assert "\n" not in str(found.value)


def test_another_error_of_the_system_is_not_explained(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explained(cast(Any, None), cast(Any, None), tmp_path / "checkpoints"):
        raise PermissionError(errno.EACCES, "no permission", "x")


def test_a_log_that_cannot_be_written_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFile(Path("/dev/full"))
    for text in ("first", "second"):
        handler.handle(logging.LogRecord("sdp", logging.INFO, "", 0, text, None, None))
    assert capsys.readouterr().err == "sdp: WARNING: /dev/full: cannot be written (No space left on device)\n"
    close(handler)


def close(handler: LogFile) -> None:
    with contextlib.suppress(OSError):  # its buffer can never be written
        handler.close()


def test_a_rank_whose_log_and_output_are_on_the_full_disk_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LogFile(Path("/dev/full"))
    with open("/dev/full", "w", buffering=1) as output:  # noqa: PTH123  # as stderr is
        monkeypatch.setattr(sys, "stderr", output)
        handler.handle(logging.LogRecord("sdp", logging.INFO, "", 0, "text", None, None))
        report_fatal("sdp: error: text", 2, Supervision(1, Path("/dev/full/rank-1.error")))
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # so that it can be closed
    close(handler)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory, with room for ``size``."""
    if sys.platform != "linux" or os.geteuid():
        pytest.skip("NOT TESTED: a disk that is really full is a mount here, which needs root on Linux")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("NOT TESTED: a disk that is really full is a mount here, which is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_run(config: dict[str, Any], tmp_path: Path) -> Path:
    """A run in this process that writes a checkpoint of about a megabyte after each step."""
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 4, "save_every": 1, "keep": 10, "evaluate_every": 0}
    return write_config(config, tmp_path)


def test_a_disk_with_room_for_some_checkpoints(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, and the newest whole checkpoint continues on another disk."""
    with small_disk(tmp_path / "disk", "1500k") as disk:
        more = ["--set", "training.steps=3"]
        assert main(["train", str(small_run), "--dump-dir", str(disk / "run"), *more]) == 0
        said = capsys.readouterr().err
        assert said.count("No space left on device; the previous one stays, the run goes on") == 2
        assert [line["step"] for line in read_metrics(disk / "run")] == [1, 2, 3]
        saved = disk / "run" / "checkpoints"
        assert {path.name for path in saved.iterdir()} == {"latest.json", "step-1"}
        shutil.copytree(disk / "run", tmp_path / "copy")
    assert main(["train", str(small_run), "--dump-dir", str(tmp_path / "copy"), "--resume"]) == 0
    assert {path.name for path in (tmp_path / "copy" / "checkpoints").glob("step-*")} == {
        f"step-{step}" for step in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("size", ["4k", "8k", "16k", "32k", "48k"])
def test_a_disk_without_room_for_the_files_of_a_run(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    """Wherever the room ends, the run ends in one line, and a report says what there is."""
    with small_disk(tmp_path / "disk", size) as disk:
        assert main(["train", str(small_run), "--dump-dir", str(disk / "run")]) in (0, 2)
        said = capsys.readouterr().err
        assert "No space left on device" in said
        assert "Traceback" not in said
        assert len([line for line in said.splitlines() if line.startswith("sdp: error")]) <= 1
        assert main(["report", str(disk / "run")]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err
