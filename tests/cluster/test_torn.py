"""Runs on real clusters that lose a rank or a host, and SLURM: tests/support/clusters."""

import json
from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.faults import LAUNCHERS, OPEN_MPI, SLOW, Life, meet_the_rest
from sdp.tests.support.clusters.hosts import LAUNCH, PAUSE, Hosts, finish, needs
from sdp.tests.support.clusters.slurm_scenarios import STORIES, what_is_missing
from sdp.tests.support.processes import until, written_lines

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "torn", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAUNCHERS]
)
def test_a_run_that_is_torn_again_and_again_ends_as_if_undisturbed(lives: dict[str, Future[str]], torn: str) -> None:
    needs(torn)
    said = lives[torn].result()
    if torn == "Open MPI":
        assert "mpirun.openmpi still waited for a host 30 s after the end of the job, and was killed" in said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_else_ends_a_run_under_every_launcher(hosts: Hosts, launcher: str) -> None:
    needs(launcher)
    place = list(LAUNCHERS).index(launcher)
    meet_the_rest(Life(hosts, f"rest-{place}", LAUNCHERS[launcher], "efghi"[place], 29700 + place))


SECONDS, STEPS = 240.0, 150


@pytest.mark.parametrize(
    ("launcher", "words"), [("Open MPI", OPEN_MPI), pytest.param("deepspeed", ["deepspeed"], marks=pytest.mark.slow)]
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
    assert "sdp: the run goes on without host-l, which does not answer" in said()
    assert len(hosts.losses(run)) == STEPS
    (restart,) = written_lines(hosts.folder / run / "restarts.jsonl")
    assert restart["step"] > 0 and restart["lost_steps"] > 0
    samples = [line["samples"] for line in written_lines(hosts.folder / run / "metrics.jsonl")]
    assert samples == [8 * step for step in range(1, STEPS + 1)]
    saved = json.loads((hosts.folder / run / "config.json").read_text())
    assert (saved["sdp"]["groups"], saved["gradient_accumulation_steps"]) == (2, 2)
    hosts.nothing_left(run, "al", 29650, 120)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
def test_slurm(stories: dict[str, Future[None]], story: str) -> None:
    if missing := what_is_missing():
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install slurm-wlm munge")
    stories[story].result()
