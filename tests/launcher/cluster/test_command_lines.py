"""``sdp launch --dry-run``: the words that each launcher would be given."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sdp.engine.errors import LaunchError
from sdp.launcher.cluster.commands import Start, deepspeed_command, mpirun_command, stop_command
from sdp.launcher.cluster.hosts import Host
from sdp.launcher.cluster.rank import rank_variables
from sdp.tests.support.launch_lines import command_of, dry_run, train_words
from sdp.tests.support.processes import alive
from sdp.tools.cli import main

pytestmark = pytest.mark.usefixtures("folder")
PYTHON = sys.executable


def test_local(capsys: pytest.CaptureFixture[str]) -> None:
    printed = dry_run(capsys, "--launcher", "local", "--gpus-per-node", "4", "run.json", "--fsdp", "2")
    assert command_of(printed)[:2] == [PYTHON, "-P"]
    assert command_of(printed)[3:] == ["sdp", "train", "run.json", "--fsdp", "2", "--nproc", "4"]


def test_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--launcher", "deepspeed", "--hostfile", "hosts", "--exclude", "worker-1:0,2", "--env", "NCCL_DEBUG=INFO",
        "run.json", "--resume",
    ]  # fmt: skip
    printed = dry_run(capsys, *words)
    command = command_of(printed)
    runner = [
        "--hostfile", "hosts", "--include", "worker-0:0,1@worker-1:1,3", "--force_multi", "--master_addr", "worker-0",
    ]  # fmt: skip
    runner += ["--master_port", "29500", "--no_python", "--no_local_rank", PYTHON, "-P", "-m"]
    runner += ["sdp.launcher.cluster.rank", "worker-0:0,1@worker-1:1,3", "worker-0:29500"]
    assert command[:3] == [PYTHON, "-m", "deepspeed.launcher.runner"]
    assert command[3 : 3 + len(runner)] == runner
    assert train_words(printed) == ["train", "run.json", "--resume", "--set", 'env.NCCL_DEBUG="INFO"']
    assert printed.splitlines()[1:3] == [
        "# ranks 0 to 1 on worker-0, devices 0,1",
        "# ranks 2 to 3 on worker-1, devices 1,3",
    ]


def test_a_signal_reaches_the_ranks_of_one_run_under_deepspeed(tmp_path: Path) -> None:
    """Two runs, each with two ranks below a process like DeepSpeed's. A rank has a child too."""
    command = stop_command([Host("a", (0,)), Host("b", (0, 1))], ("host-a.x", 1111), 15)
    assert command[:-1] == ["pdsh", "-R", "ssh", "-f", "1024", "-w", "a,b"]
    rank = "import os, subprocess; child = subprocess.Popen(['sleep', '60']); "
    rank += "os.write(1, f'{os.getpid()} {child.pid}\\n'.encode()); child.wait()"
    launch = f"import subprocess, sys\nranks = [subprocess.Popen([sys.executable, '-c', {rank!r}]) for _ in '12']\n"
    (tmp_path / "deepspeed/launcher").mkdir(parents=True)
    for name, text in (("", ""), ("launcher/", ""), ("launcher/", f"{launch}for each in ranks: each.wait()")):
        (tmp_path / "deepspeed" / name / ("launch.py" if text else "__init__.py")).write_text(text)
    started = []
    for port in (1111, 11111):
        words = [PYTHON, "-u", "-m", "deepspeed.launcher.launch", "--no_python", "0,1", f"host-a.x:{port}", "train"]
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, process_group=0))
    try:
        pids = []
        for process in started:
            assert process.stdout is not None
            pids.append([list(map(int, process.stdout.readline().split())) for _ in "12"])
        assert subprocess.run(["bash", "-c", command[-1]]).returncode == 0
        assert started[0].wait(20) == 0
        assert [alive(pid) for ranks in pids for pair in ranks for pid in pair] == [False, True] * 2 + [True] * 4
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)


def test_open_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--launcher", "mpirun", "--mpi", "openmpi", "--hostfile", "hosts", "run.json"]
    printed = dry_run(capsys, "--launcher-args=--allow-run-as-root", *words)
    command = command_of(printed)
    assert command[:5] == ["mpirun", "-np", "6", "--host", "worker-0:2,worker-1:4"]
    assert "--allow-run-as-root" in command
    assert train_words(printed) == ["train", "run.json"]
    assert not any(
        "tcp_if" in word or word in ("btl", "tcp,self", "^openib") for word in command
    )  # InfiniBand stays possible


def test_mpich(capsys: pytest.CaptureFixture[str]) -> None:
    printed = dry_run(
        capsys, "--launcher", "mpirun", "--mpi", "mpich", "--hostfile", "hosts", "--mpirun", "mpiexec", "run.json"
    )
    command = command_of(printed)
    hosts = command[command.index("-hosts") :]
    assert command[0] == "mpiexec"
    assert hosts[:4] == ["-hosts", "worker-0:2,worker-1:4", "-n", "6"]
    assert hosts[4:] == [
        PYTHON, "-P", "-m", "sdp.launcher.cluster.rank", "worker-0:0,1@worker-1:0,1,2,3", "worker-0:29500", "train",
        "run.json",
    ]  # fmt: skip


def test_intel_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(dry_run(capsys, "--launcher", "mpirun", "--mpi", "intel", "--hostfile", "hosts", "run.json"))
    assert command[command.index("I_MPI_PIN") :][:2] == ["I_MPI_PIN", "0"]
    first, second = " ".join(command).split(" : ")
    assert "-host worker-0 -n 2 " in first
    assert second.startswith(
        f"-host worker-1 -n 4 {PYTHON} -P -m sdp.launcher.cluster.rank worker-0:0,1@worker-1:0,1,2,3 worker-0:29500 "
        "train run.json"
    )


def test_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--partition", "gpu", "--account", "a1", "--qos", "high", "--time", "1-12:00:00", "--constraint", "a100&nvlink",
    ]  # fmt: skip
    options += ["--container", "docker://nvcr.io/x:1", "--container-mounts", "/data:/data", "--signal-seconds", "120"]
    printed = dry_run(
        capsys, "--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "4", *options, "run.json", "--dump-dir", "out"
    )
    lines = printed.splitlines()
    expected = "nodes=2 ntasks-per-node=4 gpus-per-node=4 partition=gpu time=1-12:00:00 constraint=a100&nvlink"
    assert {f"#SBATCH --{option}" for option in expected.split()} <= set(lines)
    assert "#SBATCH --signal=B:USR1@120" in lines
    assert f'#SBATCH --output="{Path.cwd()}/out/slurm/job-%j.log"' in lines
    srun = next(line for line in lines if line.startswith("srun "))
    assert f"--container-image=docker://nvcr.io/x:1 --container-mounts={Path.cwd()}:{Path.cwd()},/data:/data" in srun
    assert not Path("out").exists()  # a dry run leaves nothing


@pytest.mark.parametrize(
    "launcher",
    [
        ["deepspeed", "--hostfile", "hosts", "--nodes", "2", "--gpus-per-node", "2"],
        ["mpirun", "--mpi", "openmpi", "--hostfile", "hosts", "--nodes", "2", "--gpus-per-node", "2"],
        ["slurm", "--nodes", "2", "--gpus-per-node", "2"],
    ],
)
@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallelism_across_hosts_is_warned_of(
    capsys: pytest.CaptureFixture[str], launcher: list[str], degree: int
) -> None:
    settings = ["--set", "sdp.groups=1", "--tp", str(degree)]
    assert main(["launch", "--dry-run", "--launcher", *launcher, "run.json", *settings]) == 0
    said = capsys.readouterr().err
    names = "node 0 and node 1" if launcher[0] == "slurm" else "worker-0 and worker-1"
    assert (
        f"sdp: WARNING: tensor parallelism of 4 ranks crosses the network: ranks 0 to 3 are on {names}" in said
    ) == (degree == 4)
    assert said.count("\n") == (degree == 4)


def test_slurm_without_gpus_asks_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpus-per-node" not in dry_run(capsys, "--launcher", "slurm", "--gpus-per-node", "2", "--cpu", "run.json")


def test_deepspeed_keeps_the_users_ssh_options(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(["train"], "python", Path("/w"))
    monkeypatch.delenv("PDSH_SSH_ARGS_APPEND", raising=False)
    alone = deepspeed_command(start, [Host("a", (0,))], Path("hosts"), ("a", 1))[1]["PDSH_SSH_ARGS_APPEND"]
    assert alone.startswith("-o ServerAliveInterval=")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222 -i key")
    _, settings = deepspeed_command(start, [Host("a", (0,))], Path("hosts"), ("a", 1))
    assert settings == {"PDSH_SSH_ARGS_APPEND": f"-p 2222 -i key {alone}"}


def test_search_path_goes_to_every_host() -> None:
    start = Start(["train"], "python", Path("/w"), {"PYTHONPATH": "/a b;c"})
    assert "PYTHONPATH=/a b;c" in mpirun_command(start, [Host("a", (0,))], "openmpi", "mpirun", ("a", 1))
    hydra = mpirun_command(start, [Host("a", (0,))], "mpich", "mpirun", ("a", 1))
    assert hydra[hydra.index("-genv") :][:3] == ["-genv", "PYTHONPATH", "/a b;c"]


# -- a rank that a launcher started finds its local rank and its GPUs ------------------------------


def open_mpi(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, local_size: int, size: int = 5) -> None:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_rank_completes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=1, local_size=3)
    settings = rank_variables([[0, 1], [1, 2, 3]], "h", "7")
    assert settings == {
        "MASTER_ADDR": "h", "MASTER_PORT": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3",
        "CUDA_VISIBLE_DEVICES": "1,2,3",
    }  # fmt: skip


def test_rank_on_another_host_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=0, local_size=2)
    with pytest.raises(LaunchError, match="Open MPI gave rank 3 the local rank 0, but 1 on host number 1 was planned"):
        rank_variables([[0, 1], [1, 2, 3]], "h", "7")
    open_mpi(monkeypatch, rank=3, local=0, local_size=2, size=4)
    with pytest.raises(LaunchError, match="started 4 processes, but 5 were planned"):
        rank_variables([[0, 1], [1, 2, 3]], "h", "7")


def test_local_ranks_of_unequal_hosts_under_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed numbers ranks 2, 3, 4 of hosts with 2 and 3 slots as 2, 0, 1."""
    values = {
        "RANK": 2, "WORLD_SIZE": 5, "LOCAL_RANK": 2, "LOCAL_SIZE": 3, "CROSS_RANK": 1, "MASTER_ADDR": "h",
        "MASTER_PORT": 7,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert rank_variables([[0, 1], [0, 1, 2]], "h", "7")["LOCAL_RANK"] == "0"
