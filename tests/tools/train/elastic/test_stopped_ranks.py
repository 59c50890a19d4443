"""Processes of a run with elastic groups are stopped (SIGSTOP): one of the ranks of a group, or the
rank that writes the run's files, before it writes a line.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from sdp.tests.support.clusters.elastic_runs import ElasticRun, elastic_config

HEARTBEAT = 5.0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_group_of_two_is_stopped(corpus: Path, tmp_path: Path, rank: int) -> None:
    """The other rank of its group ends. The group comes back although the rank never wakes up."""
    config = tmp_path / "config.json"
    settings = elastic_config(corpus, groups=3, heartbeat_seconds=HEARTBEAT, restarts=1)
    settings["sdp"] |= {"capacity": 0.7, "masking": "backward"}
    settings["zero_optimization"] = {"stage": 3}
    config.write_text(json.dumps(settings))
    run = ElasticRun(config, tmp_path / "run", "--nproc", "6")
    try:
        run.wait_for(10, groups=3)
        before = sorted(run.ranks()[1])
        os.kill(before[rank], signal.SIGSTOP)
        run.wait_for(5, groups=2)
        assert re.search(rf"group 1 on .* was lost after step .* \(no heartbeat for {HEARTBEAT:g} s\)", run.said)
        run.wait_for(5, groups=3)
        assert len(run.ranks()[1]) == 2 and not set(before) & set(run.ranks()[1])
        assert run.stop() == 128 + signal.SIGTERM, run.said
    finally:
        run.kill()


# Group 0 stops itself when the file exists, between the vote for a step and the step's line.
STOPS = """
import os, signal, sys
from pathlib import Path
from sdp.launcher import elastic
from sdp.tools.cli import entry
from sdp.tools.train.observers.recorder import Recorder

sign, write = Path({sign!r}), Recorder.on_step

def stops(self, line):
    if os.environ["SDP_ELASTIC_GROUP"] == "0" and sign.exists():
        sign.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    write(self, line)

Recorder.on_step = stops
elastic.own_command = lambda: [sys.executable, "-P", __file__]
entry()
"""


@pytest.mark.slow
def test_a_writer_that_was_stopped_does_not_write_when_it_wakes_up(corpus: Path, tmp_path: Path) -> None:
    """Another group has taken its lock and replaced its files. It starts again, the run goes on."""
    sign, script, config = tmp_path / "stop", tmp_path / "script.py", tmp_path / "config.json"
    script.write_text(STOPS.format(sign=str(sign)))
    settings = elastic_config(corpus, groups=3, heartbeat_seconds=HEARTBEAT, restarts=1)
    settings["sdp"]["capacity"] = 0.7
    config.write_text(json.dumps(settings))
    run = ElasticRun(config, tmp_path / "run", "--nproc", "3", new_interpreters=True, script=script)
    try:
        run.wait_for(10, groups=3)
        sign.touch()
        run.wait_for(5, groups=2)
        run.hit(0, signal.SIGCONT)
        run.wait_for(5, groups=3)
        assert run.stop() == 128 + signal.SIGTERM, run.said
    finally:
        run.kill()
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert "another process writes the files of this run now" in run.said
