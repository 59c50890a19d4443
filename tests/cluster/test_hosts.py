"""Real launchers over hosts in network namespaces end with the losses of a local start."""

from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.faults import MPICH, OPEN_MPI, TORCHRUN
from sdp.tests.support.clusters.hosts import LAUNCH, QUICKSTART, SDP, Hosts, finish, needs

# The fixtures start long runs, which continue during these tests.
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("lives", "stories")]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("deepspeed", ["deepspeed", "--hostfile", "two", *QUICKSTART, "out; $(touch pwned) 'x' %h"]),
        pytest.param("Open MPI", [*OPEN_MPI, "--hostfile", "four", *QUICKSTART, "a & b"], marks=pytest.mark.slow),
        pytest.param("MPICH", [*MPICH, "--hostfile", "two", *QUICKSTART, "mpich"], marks=pytest.mark.slow),
    ],
    ids=["deepspeed", "Open MPI on four", "MPICH"],
)
def test_the_quickstart_has_the_losses_of_a_local_start(
    hosts: Hosts, local: dict[str, Future[list[float]]], launcher: str, command: list[str]
) -> None:
    needs(launcher)
    assert hosts.run(*LAUNCH, "--launcher", *command) == pytest.approx(local["quickstart"].result(), rel=1e-6)
    assert not list(hosts.folder.rglob("pwned"))


def test_the_quickstart_by_torchrun(hosts: Hosts, local: dict[str, Future[list[float]]]) -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-port", "29590", "-m", "sdp", "train", *QUICKSTART[:-1]]
    words += ["env.GLOO_SOCKET_IFNAME=eth0", "--dump-dir", "torchrun"]
    other = hosts.start(*TORCHRUN, "--node-rank", "1", *words, log="torchrun-j.log", host="j")
    assert hosts.run(*TORCHRUN, "--node-rank", "0", *words) == pytest.approx(local["quickstart"].result(), rel=1e-6)
    assert finish(other, 60) == 0


def test_mpich_has_the_losses_of_a_local_start(hosts: Hosts, local: dict[str, Future[list[float]]]) -> None:
    needs("MPICH")
    words = ["--hostfile", "with-j", "small.json", "--set", "training.steps=2", "--dump-dir", "mpich-small"]
    run = [*LAUNCH, "--launcher", *MPICH, *words]
    assert hosts.run(*run) == pytest.approx(local["small"].result()[:2], rel=1e-6)


def test_the_users_own_mpirun_names_no_master(hosts: Hosts, local: dict[str, Future[list[float]]]) -> None:
    """The ranks agree on a master through mpi4py."""
    needs("Open MPI")
    pytest.importorskip("mpi4py", reason="NOT TESTED, no mpi4py: pip install mpi4py")
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "-np", "2", "--host", "host-a:1,host-j:1", "-x", "PYTHONPATH"]
    mpirun += ["--wdir", str(hosts.folder), "--mca", "btl_tcp_if_include", "eth0"]
    settings = ["training.steps=2", "env.GLOO_SOCKET_IFNAME=eth0"]
    assert hosts.run(*mpirun, *SDP, "train", "small.json", "--set", *settings, "--dump-dir", "mpi4py") == pytest.approx(
        local["small"].result()[:2], rel=1e-6
    )
    assert "rank 0 of 2, from the variables of Open MPI" in (hosts.folder / "mpi4py.log").read_text()
