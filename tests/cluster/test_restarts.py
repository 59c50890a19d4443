"""A run that loses a host goes on by itself on the one that is left."""

from __future__ import annotations

import json

import pytest
from sdp.tests.support.clusters.faults import OPEN_MPI
from sdp.tests.support.clusters.hosts import LAUNCH, PAUSE, Hosts, finish, needs
from sdp.tests.support.processes import until, written_lines

pytestmark = pytest.mark.cluster

SECONDS, STEPS = 240.0, 150


@pytest.mark.parametrize(
    ("launcher", "words"),
    [("Open MPI", OPEN_MPI), pytest.param("deepspeed", ["deepspeed"], marks=pytest.mark.slow)],
)
def test_a_run_that_loses_a_host_goes_on_by_itself(hosts: Hosts, launcher: str, words: list[str]) -> None:
    needs(launcher)
    run = f"restarted by {launcher}".replace(" ", "-")
    (hosts.folder / "pair").write_text("host-a slots=2\nhost-l slots=2\n")
    settings = ["sdp.groups=4", f"training.steps={STEPS}"]
    command = [*LAUNCH, "--launcher", *words, "--restarts", "2", "--hostfile", "pair", "--master-port", "29650"]
    started = hosts.start(*command, "small.json", "--set", *settings, "--dump-dir", run, log=f"{run}.log")

    def said() -> str:
        return (hosts.folder / f"{run}.log").read_text()

    def has_gone_on() -> bool:
        assert started.poll() is None, said()
        saved = hosts.checkpoints(run)
        return bool(saved) and len(hosts.losses(run)) > saved[-1] + 1

    until(has_gone_on, SECONDS, PAUSE)
    hosts.plug("l", "down")
    try:
        assert finish(started, SECONDS) == 0, said()
    finally:
        hosts.plug("l", "up")
    assert "sdp: restart 1 of 2 from the newest checkpoint in 1 s" in said()
    assert "sdp: without host-l, which does not answer" in said()
    assert len(hosts.losses(run)) == STEPS
    (restart,) = written_lines(hosts.folder / run / "restarts.jsonl")
    assert restart["step"] > 0 and restart["lost_steps"] > 0
    samples = [line["samples"] for line in written_lines(hosts.folder / run / "metrics.jsonl")]
    assert samples == [8 * step for step in range(1, STEPS + 1)]
    saved = json.loads((hosts.folder / run / "config.json").read_text())
    assert (saved["sdp"]["groups"], saved["gradient_accumulation_steps"]) == (2, 2)
    hosts.nothing_left(run, "al", 29650, 120)
