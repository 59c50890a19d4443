"""A full disk is one line, which names the newest checkpoint if the run ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from sdp.engine.environment.supervision import Supervision
from sdp.launcher.fatal_errors import report_fatal
from sdp.tools.shared.files import WriteError
from sdp.tools.train.failures import explained
from sdp.tools.train.process.log_file import LogFile


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_write_error_that_names_the_newest_checkpoint(tmp_path: Path, number: int) -> None:
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    full = OSError(number, "no room", "events.out")
    for error, start in (
        (full, "events.out: cannot be written"),
        (WriteError("metrics.jsonl: full"), "metrics.jsonl: f"),
    ):
        with pytest.raises(WriteError) as found, explained(cast(Any, None), cast(Any, None), dump_dir=tmp_path):
            raise error
        assert str(found.value).startswith(start)
        assert str(found.value).endswith(f"; the newest checkpoint: {tmp_path}/checkpoints/step-4")
        assert "\n" not in str(found.value)


def test_another_error_of_the_system_is_not_explained(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explained(cast(Any, None), cast(Any, None), dump_dir=tmp_path):
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
