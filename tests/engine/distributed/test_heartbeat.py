"""A rank that makes no progress ends, even if it is stuck in C code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sdp
from sdp.engine.distributed.heartbeat import RankPosition
from sdp.launcher.fatal_errors import FatalError

Ended = dict[str, tuple[int, str, str, Path]]  # exit code, output, errors and folder of each program

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


STUCK_FOR = {"1.5": 1, "60": 0, "": 0}  # seconds that the phase may take → exit code


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """All programs wait at the same time."""
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), PYTHONUNBUFFERED="1")
    programs = {seconds: (STUCK, "log", seconds) for seconds in STUCK_FOR}
    programs |= {watch: (AFTER_A_RUN, "where", "log", watch) for watch in ("stopped", "running")}
    started = {}
    for name, (program, *words) in programs.items():
        folder = tmp_path_factory.mktemp("program")
        command = [sys.executable, "-P", "-c", program, *words]
        options = {"env": environ, "cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[name] = subprocess.Popen(command, **options), folder
    try:
        said = {name: process.communicate(timeout=60) for name, (process, _) in started.items()}
        yield {name: (process.returncode, *said[name], folder) for name, (process, folder) in started.items()}
    finally:
        for process, _ in started.values():
            process.kill()


@pytest.mark.parametrize(("seconds", "expected"), STUCK_FOR.items())
def test_a_rank_that_is_stuck_in_c_code_ends_and_its_log_has_stacks(ended: Ended, seconds: str, expected: int) -> None:
    code, printed, errors, folder = ended[seconds]
    assert (code, printed, errors) == (expected, "" if expected else "went on\n", "")
    assert ("most recent call first" in (folder / "log").read_text()) == bool(expected)


@pytest.mark.parametrize(
    ("watch", "expected", "said"), [("stopped", 0, "other work is done\n"), ("running", 1, "no progress for 2 s\n")]
)
def test_a_watch_that_was_stopped_ends_nothing(ended: Ended, watch: str, expected: int, said: str) -> None:
    code, printed, errors, folder = ended[watch]
    assert code == expected, errors
    assert printed.endswith(said)
    where = RankPosition.read(folder / "where")
    assert where is not None
    assert where.phase == "writing lines"


def test_damaged_reports_of_a_rank_are_ignored(tmp_path: Path) -> None:
    for content in ("[" * 100_000, '{"exit_code": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "[1]", "null", ""):
        (tmp_path / "rank-0.error").write_text(content)
        assert FatalError.read(tmp_path / "rank-0.error") is None
        assert RankPosition.read(tmp_path / "rank-0.error") is None
