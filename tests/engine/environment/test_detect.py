"""Variables of each launcher, recorded from real starts, and incomplete ones."""

import dataclasses
import os
import sys
import types
from pathlib import Path

import pytest
from sdp.engine.environment import detect as environment
from sdp.engine.environment.detect import Environment, detect, first_host, local_environment, tasks_on
from sdp.engine.environment.process import search_path_settings, thread_settings, usable_cores
from sdp.engine.errors import LaunchError
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.processes import until

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu-01", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {  # Open MPI 4.1, mpirun -n 3 on one host
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_NODE_RANK": "2", "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "2072051713", "PMIX_RANK": "2", "PMIX_HOSTNAME": "vm",
}  # fmt: skip
MPICH = {  # MPICH 4.0, mpiexec.hydra -n 3 on one host
    "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "2", "PMI_FD": "14", "PMI_RANK": "2",
    "PMI_SIZE": "3",
}  # fmt: skip
SRUN = {  # SLURM 22.05, srun -N2 -n3
    "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "bash", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NODELIST": "n[1-2]", "SLURM_NPROCS": "3", "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}  # fmt: skip
BATCH_SCRIPT = {  # sbatch -N2 -n4: a rank-like set of variables, but no step
    "SLURM_JOB_ID": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
SALLOC_SHELL = {  # salloc -N2 -n4, shell on the submitting host
    "SLURM_JOB_ID": "3", "SLURM_JOB_NAME": "interactive", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
INTERACTIVE_STEP = {  # salloc with LaunchParameters=use_interactive_step
    **SALLOC_SHELL, "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "39427",
    "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
PTY_SHELL = {  # srun --pty bash
    "SLURM_JOB_ID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "42157", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
SRUN_IN_SHELL = {**SRUN, "SLURM_PTY_PORT": "45849"}  # srun inside an interactive shell inherits SLURM_PTY_PORT
SRUN_PMI2 = {**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "15", "PMI_JOBID": "1.0"}
SLURM_PLACE = Environment(2, 3, 0, 1, 1, "n1", 0, "SLURM")
CASES = {
    "torchrun": (TORCHRUN, Environment(5, 8, 1, 4, 1, "gpu-01", 29400, "torchrun")),
    "deepspeed": (DEEPSPEED, Environment(5, 8, 1, 4, 1, "192.0.2.1", 29500, "deepspeed")),
    "local start": (local_environment(2, 4, 1234).variables() | {"SDP_ERROR_FILE": "/tmp/e"}, Environment(2, 4, 2, 4, 0,
        "127.0.0.1", 1234, "sdp")),
    "five variables": ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        Environment(1, 4, 1, None, None, "a", 1, "torchrun")),
    "four variables, loopback": ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        Environment(1, 4, 1, 4, 0, "localhost", 1, "torchrun")),
    "one process": ({"RANK": "0", "WORLD_SIZE": "1"}, Environment(0, 1, 0, 1, 0, "127.0.0.1", 0, "torchrun")),
    "Open MPI": (OPEN_MPI, Environment(2, 3, 2, 3, 0, "127.0.0.1", 0, "Open MPI")),
    "Open MPI, two hosts": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "a"}, Environment(2, 3, 0, 1, None, "a", 0, "Open MPI")),
    "MPICH": (MPICH, Environment(2, 3, 2, 3, 0, "127.0.0.1", 29500, "PMI")),
    "SLURM": (SRUN, SLURM_PLACE),
    "SLURM, given master": ({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "777"}, dataclasses.replace(SLURM_PLACE,
        master_addr="10.0.0.9", master_port=777)),
    "srun in a shell": (SRUN_IN_SHELL, SLURM_PLACE),
    "srun --mpi=pmi2": (SRUN_PMI2, SLURM_PLACE),
    "torchrun in mpirun in SLURM": ({**SRUN, **OPEN_MPI, **TORCHRUN}, Environment(5, 8, 1, 4, 1, "gpu-01", 29400,
        "torchrun")),
    "torchrun in an interactive step": ({**INTERACTIVE_STEP, **TORCHRUN}, Environment(5, 8, 1, 4, 1, "gpu-01", 29400,
        "torchrun")),
    "mpirun in SLURM": ({**SRUN, **MPICH}, Environment(2, 3, 2, 3, 0, "127.0.0.1", 29500, "PMI")),
    "WORLD_SIZE exported by a batch script": ({**SRUN, "WORLD_SIZE": "3"}, SLURM_PLACE),
    "nothing": ({"PATH": "/bin", "MASTER_ADDR": "a"}, None),
    "batch script": (BATCH_SCRIPT, None),
    "salloc shell": (SALLOC_SHELL, None),
    "interactive step": (INTERACTIVE_STEP, None),
    "srun --pty shell": (PTY_SHELL, None),
    "srun --pty shell with pmi2": ({**PTY_SHELL, "PMI_RANK": "0", "PMI_SIZE": "1"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_detects_the_place_of_a_process(name: str) -> None:
    environ, expected = CASES[name]
    found = detect(environ)
    if expected is None or found is None:
        assert found is expected
        return
    if expected.master_port == 0:  # derived or free: only that it is a usable port
        assert 1024 <= found.master_port < 65536
        found = dataclasses.replace(found, master_port=0)
    assert found == expected


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


REFUSED = {
    "no world": (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR missing"),
    "no address on one host": (without({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "MASTER_ADDR"), "MASTER_ADDR missing"),
    "no port": (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT missing"),
    "no local rank": (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK missing"),
    "two missing": (without(TORCHRUN, "LOCAL_RANK", "MASTER_ADDR"), "LOCAL_RANK, MASTER_ADDR missing"),
    "world only": ({"WORLD_SIZE": "2"}, "RANK missing"),
    "local rank only": ({"LOCAL_RANK": "0"}, "RANK missing"),
    "rank too high": ({**TORCHRUN, "RANK": "8"}, "RANK=8 but WORLD_SIZE=8"),
    "local rank too high": ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4, 4 processes"),
    "not a number": ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not"),
    "negative": ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not"),
    "port too high": ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    "Open MPI without size": (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE missing"),
    "Open MPI without rank": (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK missing"),
    "Open MPI, two hosts, no master": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "MASTER_ADDR"),
    "MPICH, two hosts, no master": ({**MPICH, "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
        "MASTER_ADDR, MASTER_PORT"),
    "MPICH without size": (without(MPICH, "PMI_SIZE"), "PMI_SIZE missing"),
    "SLURM without tasks": (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS missing"),
    "SLURM without local id": (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID missing"),
    "SLURM without nodes": (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        "MASTER_ADDR missing"),
    "SLURM without job id": (without(SRUN, "SLURM_JOB_ID"), "MASTER_PORT missing"),
    "SLURM with a broken list": ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_incomplete_or_contradictory_sets(name: str) -> None:
    environ, message = REFUSED[name]
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_of_a_job_agree_on_a_port_and_steps_differ() -> None:
    def port(**changes: str) -> int:
        found = detect({**SRUN, **changes})
        assert found is not None
        return found.master_port

    assert port(SLURM_PROCID="0", SLURM_NODEID="0") == port()
    assert port(SLURM_STEP_ID="1") != port()
    assert port(SLURM_JOB_ID="99") != port()


def test_variables_describe_the_same_place() -> None:
    found = detect(TORCHRUN)
    assert found is not None
    assert detect(found.variables()) == found


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("n[1-3]", "n1"),
        ("n[08-10,12],gpu-a,b7", "n08"),
        ("r[1-2]c[3,5].ib", "r1c3.ib"),
        ("a,,b", "a"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "n[1-", "n]1[", "n[a-b]", ",a", f"n[{'9' * 5000}]"])
def test_refuses_broken_node_lists(nodes: str) -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        first_host(nodes)


def test_tasks_of_a_host() -> None:
    assert [tasks_on(host, "2(x3),1") for host in range(5)] == [2, 2, 2, 1, None]
    assert tasks_on(10**9, "1(x99999999999)") == 1, "a long list takes no memory"
    with pytest.raises(LaunchError):
        tasks_on(0, "2(3)")


def test_settings_leave_what_the_user_set() -> None:
    assert thread_settings(4, {"OMP_NUM_THREADS": "3"}) == {}
    assert thread_settings(10_000, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_settings(1, {}) == {"OMP_NUM_THREADS": str(usable_cores())}


def test_search_path_is_extended_once(tmp_path) -> None:
    added = search_path_settings(tmp_path, {"PYTHONPATH": "/other"})
    assert added == {"PYTHONPATH": f"{tmp_path}{os.pathsep}/other"}
    assert search_path_settings(tmp_path, added) == {}


class FakeMPI:
    """mpi4py's ``MPI`` on rank 2 of ``size``: it begins once and ends once."""

    def __init__(self, size: int, begun: bool) -> None:
        self.begun, self.ended = begun, False
        self.COMM_WORLD = types.SimpleNamespace(
            Get_size=lambda: size, Get_rank=lambda: 2, bcast=lambda own: ("gpu-01", 29400)
        )

    def Is_initialized(self) -> bool:  # noqa: N802
        return self.begun

    def Is_finalized(self) -> bool:  # noqa: N802
        return self.ended

    def Init(self) -> None:  # noqa: N802
        assert not self.begun
        self.begun = True

    def Finalize(self) -> None:  # noqa: N802
        assert self.begun and not self.ended
        self.ended = True


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_mpi4py_of_another_mpi_names_no_master(
    monkeypatch: pytest.MonkeyPatch, world_size: int, begun: bool
) -> None:
    """Each rank is then alone in a world of its own, and would name itself; the recorded start has
    3 ranks. A script may have begun MPI.
    """
    for name in os.environ:
        if name.startswith(("MASTER_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "")  # so that what is exported is undone
    monkeypatch.setenv("MASTER_PORT", "")
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    mpi = FakeMPI(world_size, begun)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi, rc=lambda **_: None))  # type: ignore[arg-type]
    monkeypatch.setattr(environment, "find_spec", lambda _: True)
    for _ in range(2):
        detected = detect()
        assert detected is not None
        assert (detected.master_addr == "gpu-01") == (world_size == 3)
    assert mpi.ended != begun  # a script's own MPI goes on


def test_a_lone_process_can_start_ranks_of_its_own() -> None:
    notebook = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for environ, alone in (
        (notebook | {"SLURM_NODEID": "0"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),  # a pod
        (local_environment(0, 1, 1234).variables() | {"SDP_ERROR_FILE": "/tmp/e"}, False),
        (TORCHRUN, False),
    ):
        found = detect(environ)
        assert found is not None
        assert found.is_alone == alone


def test_a_rank_without_peers_says_what_it_waits_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from sdp.engine.environment import process; process.SILENT_SECONDS = 0.5\n"
        "from sdp.engine.distributed.join import init_distributed; init_distributed()"
    )
    place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": environment.free_port()}
    waiting = ForkedScript(script, environment=place)
    until(lambda: "in each\n" in waiting.printed(), seconds=60)
    waiting.kill()
    line = next(line for line in waiting.printed().splitlines() if "[c10d]" not in line)  # torch found no host name
    assert line.startswith("rank 0 of 2 (RANK of torchrun) waits at 127.0.0.1:")
    assert "unset RANK, WORLD_SIZE, LOCAL_RANK; if the run has several pods, start torchrun in each" in line
