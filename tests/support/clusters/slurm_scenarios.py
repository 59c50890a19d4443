"""Scenarios for a real SLURM over four hosts. Each checks ``sdp launch --status``."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.hosts import LAUNCH, PAUSE, SCRIPTS, SDP, Hosts, is_rank
from sdp.tests.support.clusters.served import ServedRun
from sdp.tests.support.processes import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
SECONDS = 240.0  # the limit for something that takes a few seconds on idle cores
ENDLESS = "training.steps=1000000"
# For ranks that are stopped for a while, in a step or in a save.
PATIENT = ("training.step_timeout=600", "training.save_timeout=600")
ON_SLURM = [*LAUNCH, "--launcher", "slurm", "--cpu"]
ALONE = ("sdp.groups=1", "sdp.capacity=1.0")  # one rank, for scenarios in which the number does not matter


class Slurm:
    """The commands that a user runs on host-a."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts

    def __call__(self, *command: str) -> str:
        return self.hosts.said(*command)

    def submit(
        self, run: str, *options: str, settings: tuple[str, ...] = (), nodes: int = 1, partition: str = "side"
    ) -> str:
        """Submit two ranks, or one if ``ALONE``, with ``sdp launch``; return the job's id.

        Args:
            run: The dump directory.
            *options: Further options of ``sdp launch``.
            settings: Values for ``--set``.
            nodes: The number of nodes.
            partition: SLURM's partition.
        """
        ranks = 1 if ALONE[0] in settings else 2
        launch = [*ON_SLURM, "--nodes", str(nodes), "--gpus-per-node", str(ranks // nodes), "--partition", partition]
        words = ["--set", *settings] if settings else []
        return self(*launch, *options, "small.json", *words, "--dump-dir", run).split()[1].rstrip(";")

    def status(self, run: str) -> str:
        return self(*SDP, "launch", "--launcher", "slurm", "--status", run).partition(": ")[2]

    def status_without_slurm(self, run: str) -> str:
        """Return the status that the run's own files give, without SLURM's commands."""
        return self(
            "sh", "-c", 'PATH= exec "$@"', "sh", *SDP, "launch", "--launcher", "slurm", "--status", run
        ).partition(": ")[2]

    def wait(self, run: str, *states: str) -> str:
        """Wait until the status begins with one of ``states``; return the status.

        The states must be lasting ones, because checks are rare: each one starts a process.
        """
        return until(lambda: now if (now := self.status(run)).startswith(states) else None, SECONDS, 3.0)

    def steps(self, run: str, count: int) -> None:
        """Wait until the run has written that many steps."""
        until(lambda: len(self.hosts.losses(run)) >= count, SECONDS, PAUSE)

    def rest(self, run: str, number: signal.Signals = signal.SIGSTOP) -> None:
        """Stop the run's ranks while the test waits for SLURM, because other tests need the cores.

        SLURM sends SIGCONT before it ends a job.
        """
        for pid in filter(is_rank, self.hosts.processes(run, "abcd")):
            os.kill(pid, number)

    def said(self, run: str) -> str:
        """Return everything that the run's jobs and tasks printed."""
        return "\n".join(
            log.read_text(errors="replace") for log in sorted((self.hosts.folder / run / "slurm").glob("*.log"))
        )


def what_is_missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def slurm_over(hosts: Hosts) -> Iterator[Slurm]:
    """Run one controller and four nodes, host-a to host-d, inside the context."""
    hosts.variables["SLURM_CONF"] = str(hosts.folder / "slurm/slurm.conf")
    try:
        made = subprocess.run([SCRIPTS / "slurm_up.sh", hosts.folder], capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        yield Slurm(hosts)
    finally:
        subprocess.run([SCRIPTS / "slurm_down.sh", hosts.folder], check=False)


def the_same_losses_inside_the_users_own_srun(slurm: Slurm, expected: Future[list[float]]) -> None:
    settings = ["training.steps=2", "env.GLOO_SOCKET_IFNAME=eth0"]
    srun = ["srun", "--partition", "side", "--nodes", "2", "--ntasks-per-node", "1"]
    words = [*srun, *SDP, "train", "small.json", "--set", *settings, "--dump-dir", "own"]
    losses = slurm.hosts.run(*words, seconds=SECONDS)
    assert losses == pytest.approx(expected.result()[:2], rel=1e-6)


def a_job_that_is_preempted_and_loses_a_rank_ends_as_if_undisturbed_and_one_that_loses_a_node_waits(
    slurm: Slurm, expected: Future[list[float]]
) -> None:
    run = "moved"
    job = slurm.submit(run, "--time", "10", settings=(ENDLESS,), nodes=2, partition="main")
    slurm.steps(run, 2)
    assert slurm.status(run) == slurm.status_without_slurm(run) == "running"
    slurm("sbatch", "--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null", "--wrap", "true")
    # The job is in the queue for only a few seconds, so its status may never show that.
    resumed = until(lambda: re.search(rf"resumed from {run}/checkpoints/step-(\d+)\n", slurm.said(run)), SECONDS, PAUSE)
    preempted = int(resumed[1])
    assert preempted >= 2
    assert "Restarts=1 " in slurm("scontrol", "show", "job", job)
    slurm.steps(run, preempted + 2)
    assert "environment of every rank: GLOO_SOCKET_IFNAME=eth0" in slurm.said(run)

    (rank,) = (pid for pid in slurm.hosts.processes(run, "b") if is_rank(pid))
    os.kill(rank, signal.SIGKILL)
    assert slurm.wait(run, "failed", "done") == slurm.status_without_slurm(run) == "failed, exit code 137", slurm.said(
        run
    )
    assert "srun: error: host-b: task 1: Killed" in slurm.said(run)

    def resume(steps: int) -> str:
        launch = [*ON_SLURM, "--nodes", "2", "--gpus-per-node", "1", "--partition", "main"]
        words = [*launch, "small.json", "--resume", "--set", f"training.steps={steps}", "--dump-dir", run]
        return slurm(*words).split()[1].rstrip(";")

    end = len(slurm.hosts.losses(run)) + 20
    resume(end)
    assert slurm.wait(run, "done", "failed") == slurm.status_without_slurm(run) == "done", slurm.said(run)
    losses = slurm.hosts.losses(run)
    assert len(losses) == end
    assert losses[: len(expected.result())] == pytest.approx(expected.result()[: len(losses)], rel=1e-6)

    job = resume(10**6)
    slurm.steps(run, end + 2)
    slurm.hosts.plug("b", "down")
    try:
        slurm.wait(run, "pending")  # SLURM waits 30 s for a silent node, and then for another
        assert "rank 0 on host-a, step " in slurm.said(run)
        assert "no progress for 8 s" in slurm.said(run)
        slurm("scancel", job)
    finally:
        slurm.hosts.plug("b", "up")


def a_job_near_its_time_limit_goes_back_to_the_queue_and_resumes(slurm: Slurm, expected: Future[list[float]]) -> None:
    """SLURM sends the signal itself. It checks the limit twice a minute."""
    job = slurm.submit("limited", "--time", "2", "--signal-seconds", "50", settings=(*ALONE, ENDLESS, *PATIENT))
    slurm.steps("limited", 2)
    slurm.rest("limited")
    events = slurm.hosts.folder / "limited/slurm/events"
    until(lambda: f"{job} time-limit-near" in events.read_text(), SECONDS, PAUSE)
    slurm.rest("limited", signal.SIGCONT)
    until(lambda: f"{job} requeued" in events.read_text(), SECONDS, PAUSE)
    # On a busy machine, the limit may be near before the first step. Then the next start saves the
    # checkpoint.
    resumed = until(
        lambda: re.search(r"resumed from limited/checkpoints/step-(\d+)\n", slurm.said("limited")), 2 * SECONDS, PAUSE
    )
    assert f"stopped by SIGTERM after step {resumed[1]}" in slurm.said("limited")
    slurm("scancel", job)
    assert slurm.wait("limited", "cancelled", "failed").startswith("cancelled")


def jobs_that_do_not_end_well(slurm: Slurm, expected: Future[list[float]]) -> None:
    """All jobs run at the same time, because SLURM checks the time limit only twice a minute."""
    # A step that takes longer than SLURM waits for a job to end.
    settings = (*ALONE, ENDLESS, *PATIENT, "gradient_accumulation_steps=100000")
    late = slurm.submit("late", "--time", "10", "--signal-seconds", "1", settings=settings)
    until(lambda: "step 0: " in slurm.said("late"), SECONDS, PAUSE)
    slurm.rest("late")
    slurm("scontrol", "update", f"JobId={late}", "EndTime=now+1")

    cancelled = slurm.submit("cancelled", settings=(ENDLESS,))
    slurm.submit("wrong", settings=(*ALONE, "data.path=nowhere"))
    slurm.submit("fat", "--launcher-args=--mem=100M", settings=(*ALONE, ENDLESS))
    held = slurm.submit("held", "--launcher-args=--hold")
    assert slurm.status("held") == slurm.status_without_slurm("held") == "pending"
    slurm("scancel", held)
    assert slurm.status("held") == "cancelled"

    slurm.steps("cancelled", 3)
    slurm("scancel", cancelled)
    assert slurm.wait("cancelled", "cancelled", "failed").startswith("cancelled")
    assert slurm.status_without_slurm("cancelled").startswith("cancelled")
    saved, steps = slurm.hosts.checkpoints("cancelled"), len(slurm.hosts.losses("cancelled"))
    assert saved[-1:] == [steps], slurm.said("cancelled")
    assert "stopped by SIGTERM after step" in slurm.said("cancelled"), slurm.said("cancelled")

    assert slurm.wait("wrong", "failed", "done") == slurm.status_without_slurm("wrong") == "failed, exit code 2"
    assert slurm.wait("fat", "out of memory", "failed") == slurm.status_without_slurm("fat"), slurm.said("fat")
    assert slurm.status("fat").startswith("out of memory"), slurm.said("fat")
    assert slurm.wait("late", "timeout", "failed", "pending").startswith("timeout")
    assert slurm.status_without_slurm("late").startswith("timeout")


def a_group_of_a_service_is_a_job_that_is_requeued(slurm: Slurm, expected: Future[list[float]]) -> None:
    run = ServedRun(slurm.hosts, "jobs", 29801)
    batch = ["sbatch", "--parsable", "--requeue", "--partition", "side", "--open-mode", "append"]
    jobs = [
        slurm(*batch, "--output", f"job-{group}.log", "--wrap", shlex.join([*run.group, f"job-{group}"]))
        for group in range(2)
    ]
    run.reach(groups=2)
    slurm("scontrol", "requeue", jobs[1])  # cancels the job, and puts it into the queue again
    run.reach(groups=1)
    run.reach(groups=2)
    run.check_end([])
    assert "Restarts=1 " in slurm("scontrol", "show", "job", jobs[1])
    states = [until(lambda job=job: _ended(slurm, job), SECONDS, 1.0) for job in jobs]
    assert states == ["COMPLETED"] * 2, [(slurm.hosts.folder / f"job-{group}.log").read_text() for group in range(2)]


def _ended(slurm: Slurm, job: str) -> str | None:
    state = slurm("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]
    return None if state in ("PENDING", "RUNNING", "COMPLETING") else state


STORIES = (
    a_job_that_is_preempted_and_loses_a_rank_ends_as_if_undisturbed_and_one_that_loses_a_node_waits,
    a_job_near_its_time_limit_goes_back_to_the_queue_and_resumes,
    jobs_that_do_not_end_well,
    a_group_of_a_service_is_a_job_that_is_requeued,
    the_same_losses_inside_the_users_own_srun,
)
