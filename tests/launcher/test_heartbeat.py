"""A rank that cannot end itself is ended by the process that watches it, and one that can is left
alone. Whole runs: tests/cluster.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sdp
from sdp.launcher.fatal_errors import FatalError
from sdp.launcher.heartbeat import Whereabouts
from sdp.tests.support.processes import alive, until

# Says the guard's process id once the guard knows where the rank is, and then stops itself.
RANK = """
import os, signal, sys, time
from pathlib import Path
from sdp.launcher import heartbeat
heartbeat.SILENT_SECONDS = 0.5
beat = heartbeat.Heartbeat(3, None, Path(sys.argv[1]), print, guarded=True)
beat.at(5, "backward", float(sys.argv[2]) if sys.argv[2] else None)
time.sleep(1)
print(beat.guard_pid, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""

# Goes on for longer than its last phase may take, after the watch was stopped.
AFTER_A_RUN = """
import sys, threading, time
from pathlib import Path
from sdp.launcher import heartbeat
beat = heartbeat.Heartbeat(0, Path(sys.argv[1]), Path(sys.argv[2]), print, guarded=True)
beat.at(5, "writing lines", 2.0)
guard = Path(f"/proc/{beat.guard_pid}")
assert guard.exists()
if sys.argv[3] == "stopped":
    beat.stop()
    assert not guard.exists() and "heartbeat" not in {each.name for each in threading.enumerate()}
time.sleep(5 if sys.argv[3] == "stopped" else 60)
print("other work is done")
"""


def rank(tmp_path: Path, seconds: str) -> tuple[subprocess.Popen[str], int]:
    """The process, stopped, and its guard's id."""
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    words = [sys.executable, "-P", "-c", RANK, str(tmp_path / "log"), seconds]
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_stopped_rank_is_killed_and_named(tmp_path: Path) -> None:
    process, guard = rank(tmp_path, "1.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert (
        err
        == f"sdp: error: rank 3 on {socket.gethostname()}, step 5, backward: the process is stopped or stuck: killed\n"
    )
    until(lambda: not alive(guard))


@pytest.mark.parametrize("seconds", ["", "60"])
def test_one_that_has_time_is_left_alone(tmp_path: Path, seconds: str) -> None:
    process, guard = rank(tmp_path, seconds)
    time.sleep(2)
    os.kill(guard, signal.SIGTERM)  # as a launcher that signals all processes of a job
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    until(lambda: not alive(guard))


@pytest.mark.parametrize(
    ("watch", "ended", "said"), [("stopped", 0, "other work is done\n"), ("running", 1, "no progress for 2 s\n")]
)
def test_a_watch_that_was_stopped_ends_nothing(tmp_path: Path, watch: str, ended: int, said: str) -> None:
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), PYTHONUNBUFFERED="1")
    words = [sys.executable, "-P", "-c", AFTER_A_RUN, str(tmp_path / "where"), str(tmp_path / "log"), watch]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == ended, done.stderr
    assert done.stdout.endswith(said)
    where = Whereabouts.read(tmp_path / "where")
    assert where is not None
    assert where.phase == "writing lines"


def test_damaged_reports_of_a_rank_are_ignored(tmp_path: Path) -> None:
    for content in ("[" * 100_000, '{"exit_code": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "[1]", "null", ""):
        (tmp_path / "rank-0.error").write_text(content)
        assert FatalError.read(tmp_path / "rank-0.error") is None
        assert Whereabouts.read(tmp_path / "rank-0.error") is None
