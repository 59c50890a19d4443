"""A real SLURM over two hosts: losses, preemption, the time limit, scancel, and what --status says of every kind of end.

Skipped, loudly, where a machine cannot make the hosts or has no SLURM.
"""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from hosts import LAUNCH, SCRIPTS, SDP, Hosts
from processes import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
SECONDS = 180.0  # for what takes some seconds on idle cores
pytestmark = pytest.mark.cluster


class Slurm:
    """The commands of a user on host-a."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts

    def __call__(self, *command: str) -> str:
        return self.hosts.said(*command)

    def submit(self, run: str, *options: str, settings: tuple[str, ...] = (), nodes: int = 1) -> str:
        """``sdp launch`` for two ranks on each node, with dump directory ``run``; the job's id."""
        launch = [*LAUNCH, "--launcher", "slurm", "--cpu", "--nodes", str(nodes), "--gpus-per-node", "2", *options]
        words = ["--set", *settings] if settings else []
        return self(*launch, "small.json", *words, "--dump-dir", run).split()[1].rstrip(";")

    def status(self, run: str) -> str:
        return self(*SDP, "launch", "--launcher", "slurm", "--status", run).partition(": ")[2]

    def status_without_slurm(self, run: str) -> str:
        """By the run's own files."""
        return self("sh", "-c", 'PATH= exec "$@"', "sh", *SDP, "launch", "--launcher", "slurm", "--status", run).partition(": ")[2]

    def wait(self, run: str, *states: str) -> str:
        """The status once it begins with one of ``states``."""
        return until(lambda: now if (now := self.status(run)).startswith(states) else None, SECONDS)

    def steps(self, run: str, count: int) -> None:
        """Return when the run has noted that many steps."""
        until(lambda: len(self.hosts.losses(run)) >= count, SECONDS)

    def said(self, run: str) -> str:
        """All that the run's jobs and tasks printed."""
        return "\n".join(log.read_text(errors="replace") for log in sorted((self.hosts.folder / run / "slurm").glob("*.log")))


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install slurm-wlm munge")
    hosts.variables["SLURM_CONF"] = str(hosts.folder / "slurm/slurm.conf")
    try:
        made = subprocess.run([SCRIPTS / "slurm_up.sh", hosts.folder], capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        yield Slurm(hosts)
    finally:
        subprocess.run([SCRIPTS / "slurm_down.sh", hosts.folder], check=False)


def test_same_losses_as_a_local_start(slurm: Slurm, expected: list[float]) -> None:
    slurm.submit("batch", settings=("training.steps=4",), nodes=2)
    assert slurm.wait("batch", "done", "failed") == "done", slurm.said("batch")
    assert slurm.status_without_slurm("batch") == "done"
    assert slurm.hosts.losses("batch") == pytest.approx(expected[:4], rel=1e-6)
    assert "environment of every rank: GLOO_SOCKET_IFNAME=eth0" in slurm.said("batch")


def test_same_losses_inside_the_users_own_srun(slurm: Slurm, expected: list[float]) -> None:
    settings = ["training.steps=4", "env.GLOO_SOCKET_IFNAME=eth0"]
    train = [*SDP, "train", "small.json", "--set", *settings, "--dump-dir", "own"]
    losses = slurm.hosts.run("srun", "--nodes", "2", "--ntasks-per-node", "2", *train, seconds=SECONDS)
    assert losses == pytest.approx(expected[:4], rel=1e-6)


def test_a_job_that_is_preempted_and_one_near_its_time_limit_go_on(slurm: Slurm, expected: list[float]) -> None:
    job = slurm.submit("moved", "--partition", "main", "--time", "10", nodes=2)
    slurm.steps("moved", 5)
    assert slurm.status("moved") == "running"
    slurm("sbatch", "--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null", "--wrap", "true")
    slurm.wait("moved", "pending")
    preempted = slurm.hosts.checkpoints("moved")[-1]
    assert 5 <= preempted < len(expected)
    slurm.steps("moved", preempted + 5)
    slurm("scancel", "--batch", "--signal", "USR1", job)  # what --signal has SLURM send before the time limit
    slurm.wait("moved", "pending")
    near_limit = slurm.hosts.checkpoints("moved")[-1]
    assert preempted + 5 <= near_limit < len(expected)
    assert slurm.wait("moved", "done", "failed") == "done", slurm.said("moved")
    for step in (preempted, near_limit):
        assert f"resumed from moved/checkpoints/step-{step}\n" in slurm.said("moved")
    assert slurm.hosts.losses("moved") == pytest.approx(expected, rel=1e-6)


def test_jobs_that_do_not_end_well(slurm: Slurm) -> None:
    """All at once, for the limit of time is looked at twice a minute."""
    endless = "training.steps=1000000"
    # A step that outlasts what SLURM waits for a job that is told to end.
    late = slurm.submit("late", "--time", "10", "--signal-seconds", "1", settings=(endless, "train_batch_size=200000"))
    cancelled = slurm.submit("cancelled", settings=(endless,))
    slurm.submit("wrong", settings=("data.path=nowhere",))
    slurm.submit("fat", "--launcher-args=--mem=100M", settings=(endless,))
    held = slurm.submit("held", "--launcher-args=--hold")
    assert slurm.status("held") == slurm.status_without_slurm("held") == "pending"
    slurm("scancel", held)
    assert slurm.status("held") == "cancelled"

    slurm.steps("cancelled", 3)
    assert slurm.status("cancelled") == slurm.status_without_slurm("cancelled") == "running"
    slurm("scancel", cancelled)
    assert slurm.wait("cancelled", "cancelled", "failed").startswith("cancelled")
    assert slurm.status_without_slurm("cancelled").startswith("cancelled")
    assert slurm.hosts.checkpoints("cancelled") == [len(slurm.hosts.losses("cancelled"))]
    assert "stopped by SIGTERM after step" in slurm.said("cancelled")

    assert slurm.wait("wrong", "failed", "done") == slurm.status_without_slurm("wrong") == "failed, exit code 2"
    assert slurm.wait("fat", "out of memory", "failed") == slurm.status_without_slurm("fat") == "out of memory, exit code 137"

    until(lambda: "step 0: " in slurm.said("late"), SECONDS)
    slurm("scontrol", "update", f"JobId={late}", "EndTime=now+1")
    assert slurm.wait("late", "timeout", "failed", "pending").startswith("timeout")
    assert slurm.status_without_slurm("late").startswith("timeout")
