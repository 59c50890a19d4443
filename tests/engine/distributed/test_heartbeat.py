"""A rank that makes no progress ends, even if it is stuck in C code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.engine.distributed.heartbeat import RankPosition
from sdp.launcher.fatal_errors import FatalError

# Holds the GIL for some seconds, so that no other thread of Python runs.
STUCK = """
import ctypes, sys, time
from pathlib import Path
from sdp.engine.distributed import heartbeat
heartbeat.STUCK_SECONDS = 0.5
beat = heartbeat.Heartbeat(3, None, Path(sys.argv[1]), print)
beat.at(5, "backward", float(sys.argv[2]) if sys.argv[2] else None)
time.sleep(1)
ctypes.PyDLL(None).sleep(4)
print("went on")
"""

# Goes on for longer than its last phase may take, after the watch was stopped.
AFTER_A_RUN = """
import sys, threading, time
from pathlib import Path
from sdp.engine.distributed import heartbeat
beat = heartbeat.Heartbeat(0, Path(sys.argv[1]), Path(sys.argv[2]), print)
beat.at(5, "writing lines", 2.0)
if sys.argv[3] == "stopped":
    beat.stop()
    assert "heartbeat" not in {each.name for each in threading.enumerate()}
time.sleep(5 if sys.argv[3] == "stopped" else 60)
print("other work is done")
"""


@pytest.mark.parametrize(("seconds", "code"), [("1.5", 1), ("60", 0), ("", 0)])
def test_a_rank_that_is_stuck_in_c_code_ends_and_its_log_has_the_stacks(
    tmp_path: Path, seconds: str, code: int
) -> None:
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    words = [sys.executable, "-P", "-c", STUCK, str(tmp_path / "log"), seconds]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "" if code else "went on\n", "")
    assert ("most recent call first" in (tmp_path / "log").read_text()) == bool(code)


@pytest.mark.parametrize(
    ("watch", "ended", "said"), [("stopped", 0, "other work is done\n"), ("running", 1, "no progress for 2 s\n")]
)
def test_a_watch_that_was_stopped_ends_nothing(tmp_path: Path, watch: str, ended: int, said: str) -> None:
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), PYTHONUNBUFFERED="1")
    words = [sys.executable, "-P", "-c", AFTER_A_RUN, str(tmp_path / "where"), str(tmp_path / "log"), watch]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == ended, done.stderr
    assert done.stdout.endswith(said)
    where = RankPosition.read(tmp_path / "where")
    assert where is not None
    assert where.phase == "writing lines"


def test_damaged_reports_of_a_rank_are_ignored(tmp_path: Path) -> None:
    for content in ("[" * 100_000, '{"exit_code": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "[1]", "null", ""):
        (tmp_path / "rank-0.error").write_text(content)
        assert FatalError.read(tmp_path / "rank-0.error") is None
        assert RankPosition.read(tmp_path / "rank-0.error") is None
