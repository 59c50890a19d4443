"""A rank that is stopped while a run is told to end is killed within 15 seconds."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sdp.launcher import stopped
from sdp.launcher.local import start_local
from sdp.launcher.stopped import STOPPED_SECONDS, StoppedRanks
from sdp.tests.support.processes import until


class FakeRank:
    def __init__(self) -> None:
        self.stops = True

    def is_stopped(self) -> bool:
        return self.stops


def seconds_until_killed(look: float, runs_at: float = -1.0) -> float:
    """Look every ``look`` seconds of a clock of our own. The rank runs at one moment."""
    rank: Any = FakeRank()
    now = [0.0]
    ranks = StoppedRanks([rank], lambda: now[0])
    while True:
        now[0] += look
        rank.stops = not now[0] - look < runs_at <= now[0]
        if ranks.for_too_long() is not None:
            return now[0]


@pytest.mark.parametrize("look", [0.02, 0.05, 0.3, 1.0])
def test_the_looks_add_up_to_less_than_what_is_promised(look: float) -> None:
    assert STOPPED_SECONDS - 1 < seconds_until_killed(look) <= STOPPED_SECONDS


def test_a_rank_that_runs_in_between_gets_its_time_again() -> None:
    assert seconds_until_killed(0.5, runs_at=10.0) > STOPPED_SECONDS + 8


def test_a_stopped_rank_does_not_hold_up_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher would wait 300 seconds for a checkpoint."""
    monkeypatch.setattr(stopped, "STOPPED_SECONDS", 2.0)
    note = tmp_path / "pid"
    stop = f"os.kill(os.getpid(), {int(signal.SIGSTOP)})"
    script = f"import os; open({str(note)!r}, 'w').write(str(os.getpid())); {stop}"
    command = [sys.executable, "-Sc", script]

    def end_when_stopped() -> None:
        until(lambda: note.exists() and note.read_text() and " T " in status(int(note.read_text())))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end_when_stopped)
    thread.start()
    code = start_local([], 1, tmp_path / "logs", stop_seconds=300, command=command)
    thread.join()
    assert code == 143
    assert capsys.readouterr().err.count("rank 0, is stopped: all processes are killed") == 1


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()
