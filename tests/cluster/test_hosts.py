"""Real launchers over hosts in network namespaces end with the losses of a local start; a host that vanishes ends the run.

Skipped, loudly, where a machine cannot make such hosts.
"""

import shutil
import sys
import time

import pytest
from hosts import LAUNCH, Hosts, finish
from processes import until

pytestmark = pytest.mark.cluster
FOUR_STEPS = ["small.json", "--set", "training.steps=4", "--dump-dir"]
DEEPSPEED = [*LAUNCH, "--launcher", "deepspeed", "--hostfile"]
OPEN_MPI = [*LAUNCH, "--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root", "--hostfile"]
MPICH = [*LAUNCH, "--launcher", "mpirun", "--mpirun", "mpiexec.mpich", "--hostfile"]


def needs(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"NOT TESTED, no {program}: apt-get install {package}")


@pytest.mark.parametrize(
    ("program", "package", "command"),
    [
        ("pdsh", "pdsh", [*DEEPSPEED, "hostfile", *FOUR_STEPS, "out; $(touch pwned) 'x' %h"]),
        ("pdsh", "pdsh", [*DEEPSPEED, "four", *FOUR_STEPS, "four hosts"]),
        ("mpirun.openmpi", "openmpi-bin", [*OPEN_MPI, "hostfile", *FOUR_STEPS, "a & b"]),
        ("mpiexec.mpich", "mpich", [*MPICH, "hostfile", *FOUR_STEPS, "mpich"]),
    ],
    ids=["deepspeed", "deepspeed on four", "Open MPI", "MPICH"],
)
def test_same_losses(hosts: Hosts, expected: list[float], program: str, package: str, command: list[str]) -> None:
    needs(program, package)
    assert hosts.run(*command) == pytest.approx(expected[:4], rel=1e-6)
    assert not list(hosts.folder.rglob("pwned"))


def test_same_losses_under_torchrun(hosts: Hosts, expected: list[float]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "2", "--rdzv-backend", "static"]
    torchrun += ["--master-addr", "host-a", "--master-port", "29500"]
    settings = ["training.steps=4", "env.GLOO_SOCKET_IFNAME=eth0"]
    train = ["-m", "sdp.launcher.main", "train", "small.json", "--set", *settings, "--dump-dir", "torchrun"]
    on_b = " ".join([*torchrun, "--node-rank", "1", *train])
    script = f"ssh host-b 'cd {hosts.folder}; PYTHONPATH='$PYTHONPATH' OMP_NUM_THREADS=1 {on_b}' > on-b.log 2>&1 & exec \"$@\""
    losses = hosts.run("sh", "-c", script, "sh", *torchrun, "--node-rank", "0", *train)
    assert losses == pytest.approx(expected[:4], rel=1e-6)


def test_a_host_that_vanishes_ends_the_run_which_resumes(hosts: Hosts, expected: list[float]) -> None:
    """DeepSpeed's runner on host-a and b, and Open MPI on c and d, lose b and d at the same time."""
    needs("pdsh", "pdsh")
    needs("mpirun.openmpi", "openmpi-bin")
    words = ["small.json", "--set", "training.step_timeout=8", "training.save_every=20", "--dump-dir"]
    runs = {
        "lost-b": hosts.start(*DEEPSPEED, "hostfile", *words, "lost-b", host="a", log="a.log"),
        "lost-d": hosts.start(*OPEN_MPI, "others", *words, "lost-d", host="c", log="c.log"),
    }

    def said(host: str) -> str:
        return (hosts.folder / f"{host}.log").read_text()

    def is_between_checkpoints(run: str) -> bool:  # a save may take longer than a step
        steps = len(hosts.losses(run))
        return steps > 20 and 2 <= steps % 20 <= 10

    def cut_off(run: str) -> bool:
        if not is_between_checkpoints(run):
            assert runs[run].poll() is None, f"{run} ended before its host was lost: {said('a' if run == 'lost-b' else 'c')}"
            return False
        hosts.plug(run[-1], "down")
        return True

    left = set(runs)
    while left:  # looked at in turn: neither is to end while the other is waited for
        left -= {run for run in left if cut_off(run)}
        time.sleep(0.005)
    try:
        for host, process in zip("ac", runs.values(), strict=True):
            # 8 seconds to notice, 30 silent ones of ssh or of mpirun
            assert finish(process, 100) != 0
            assert f"rank 0 on host-{host}, step " in said(host), said(host)
            assert "no progress for 8 s" in said(host)
        assert "mpirun.openmpi still waits for a host 30 s after the job's end: killed" in said("c")
        for run in runs:
            assert 0 < len(hosts.losses(run)) < len(expected)
            # No orphans: those on the lost hosts end themselves.
            until(lambda run=run: not hosts.processes(run), 60)
    finally:
        for run in runs:
            hosts.plug(run[-1], "up")
    assert hosts.run(*DEEPSPEED, "hostfile", "small.json", "--resume", "--dump-dir", "lost-b") == pytest.approx(expected, rel=1e-6)
    assert "resumed from lost-b/checkpoints/step-" in (hosts.folder / "log").read_text()
