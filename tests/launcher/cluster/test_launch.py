"""``sdp launch``: what each launcher would be given, word by word, and that nothing in it can run anything; ``local`` runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.data.prepare import prepare
from sdp.engine.errors import LaunchError
from sdp.launcher.cluster.commands import Start, deepspeed_command, mpirun_command, stop_command
from sdp.launcher.cluster.hosts import Host
from sdp.launcher.cluster.quoting import decode
from sdp.launcher.cluster.rank import place_settings
from sdp.tools.cli import main

PYTHON = sys.executable
HOSTILE = [
    "a b",
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a\ntouch pwned\n",
    "%h",
    "&",
    "",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "run.json").write_text(json.dumps({"train_batch_size": 24, "sdp": {"groups": 2, "capacity": 0.5}}))
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["launch", "--dry-run", *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def command_of(printed: str) -> list[str]:
    """The words of the command in the first line, as a shell splits them, without what stands before it in ``env``."""
    words = shlex.split(printed.partition("\n")[0])
    return words[next(index for index, word in enumerate(words) if word != "env" and "=" not in word) :]


def train_words(printed: str) -> list[str]:
    """What ``sdp.launcher.cluster.rank`` gives to ``sdp train``, of the last rank's command."""
    words = command_of(printed)
    last = max(index for index, word in enumerate(words) if word.endswith("cluster.rank"))
    return [decode(word) for word in words[last + 3 :]]


def test_local(capsys: pytest.CaptureFixture[str]) -> None:
    printed = dry_run(capsys, "--launcher", "local", "--gpus-per-node", "4", "run.json", "--fsdp", "2")
    assert command_of(printed)[:2] == [PYTHON, "-P"]
    assert command_of(printed)[3:] == ["sdp", "train", "run.json", "--fsdp", "2", "--nproc", "4"]


def test_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--launcher",
        "deepspeed",
        "--hostfile",
        "hosts",
        "--exclude",
        "worker-1:0,2",
        "--env",
        "NCCL_DEBUG=INFO",
        "run.json",
        "--resume",
    ]
    printed = dry_run(capsys, *words)
    command = command_of(printed)
    runner = [
        "--hostfile",
        "hosts",
        "--include",
        "worker-0:0,1@worker-1:1,3",
        "--force_multi",
        "--master_addr",
        "worker-0",
    ]
    runner += [
        "--master_port",
        "29500",
        "--no_python",
        "--no_local_rank",
        PYTHON,
        "-P",
        "-m",
        "sdp.launcher.cluster.rank",
        "0,1/1,3",
        "worker-0:29500",
    ]
    assert command[:3] == [PYTHON, "-m", "deepspeed.launcher.runner"]
    assert command[3 : 3 + len(runner)] == runner
    assert train_words(printed) == ["train", "run.json", "--resume", "--set", 'env.NCCL_DEBUG="INFO"']
    assert printed.splitlines()[1:3] == [
        "# ranks 0 to 1 on worker-0, devices 0,1",
        "# ranks 2 to 3 on worker-1, devices 1,3",
    ]


def test_what_stops_a_run_under_deepspeed() -> None:
    """pdsh and a remote shell read the last word."""
    start = Start(["train"], "/usr/bin/python", Path("/w"), {"PYTHONPATH": "/a b;c"})
    command = stop_command(start, [Host("a", (0,)), Host("b", (0, 1))], ("a", 29500), 15)
    assert command[:-1] == ["pdsh", "-R", "ssh", "-f", "1024", "-w", "a,b"]
    assert shlex.split(command[-1]) == [
        "env",
        "PYTHONPATH=/a b;c",
        "/usr/bin/python",
        "-P",
        "-m",
        "sdp.launcher.cluster.stop",
        "a:29500",
        "15",
    ]


def test_open_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    printed = dry_run(
        capsys,
        "--launcher",
        "mpirun",
        "--mpi",
        "openmpi",
        "--hostfile",
        "hosts",
        "--launcher-args=--allow-run-as-root",
        "run.json",
    )
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
        PYTHON,
        "-P",
        "-m",
        "sdp.launcher.cluster.rank",
        "0,1/0,1,2,3",
        "worker-0:29500",
        "train",
        "run.json",
    ]


def test_intel_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(dry_run(capsys, "--launcher", "mpirun", "--mpi", "intel", "--hostfile", "hosts", "run.json"))
    assert command[command.index("I_MPI_PIN") :][:2] == ["I_MPI_PIN", "0"]
    first, second = " ".join(command).split(" : ")
    assert "-host worker-0 -n 2 " in first
    assert second.startswith(
        f"-host worker-1 -n 4 {PYTHON} -P -m sdp.launcher.cluster.rank 0,1/0,1,2,3 worker-0:29500 train run.json"
    )


def test_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--partition",
        "gpu",
        "--account",
        "a1",
        "--qos",
        "high",
        "--time",
        "1-12:00:00",
        "--constraint",
        "a100&nvlink",
    ]
    options += ["--container", "docker://nvcr.io/x:1", "--container-mounts", "/data:/data", "--signal-seconds", "120"]
    printed = dry_run(
        capsys, "--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "4", *options, "run.json", "--dump-dir", "out"
    )
    lines = printed.splitlines()
    for option in (
        "nodes=2",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "partition=gpu",
        "time=1-12:00:00",
        "constraint=a100&nvlink",
    ):
        assert f"#SBATCH --{option}" in lines
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


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("launcher", ["local", "deepspeed", "mpirun"])
def test_hostile_words_stay_words(capsys: pytest.CaptureFixture[str], launcher: str, word: str) -> None:
    hosts = (
        [] if launcher == "local" else ["--hostfile", "hosts"] + (["--mpi", "openmpi"] if launcher == "mpirun" else [])
    )
    out = word or "."
    printed = dry_run(capsys, "--launcher", launcher, *hosts, "--env", f"NCCL_X={word}", "run.json", "--dump-dir", out)
    expected = ["train", "run.json", "--dump-dir", out, "--set", f"env.NCCL_X={json.dumps(word)}"]
    command, _, _ = printed.partition("\n#")
    words = shlex.split(command)
    if launcher == "local":
        assert words[-len(expected) :] == expected
        return
    last = max(index for index, found in enumerate(words) if found.endswith("cluster.rank"))
    assert [decode(found) for found in words[last + 3 :]] == expected
    # A remote shell reads the joined words, as pdsh and ssh hand them over.
    joined = " ".join(words[last + 1 :])
    read = subprocess.run(["sh", "-c", f"printf '%s\\n' {joined}"], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == words[last + 1 :]
    assert not Path("pwned").exists()


@pytest.mark.parametrize("word", [word for word in HOSTILE if word and not set(word) & set('"\n%')])
def test_hostile_words_in_the_batch_script(capsys: pytest.CaptureFixture[str], folder: Path, word: str) -> None:
    """The script runs under bash with an srun that writes down its words."""
    Path("bin").mkdir()
    stand_in = Path("bin/srun")
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/words"\nexit 3\n')
    stand_in.chmod(0o755)
    printed = dry_run(
        capsys, "--launcher", "slurm", "--gpus-per-node", "2", "--env", f"NCCL_X={word}", "run.json", "--dump-dir", word
    )
    script = printed.partition("\n")[2]
    (folder / word / "slurm").mkdir(parents=True)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    ended = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    words = Path("words").read_text().splitlines()
    assert words[words.index("train") :] == [
        "train",
        "run.json",
        "--dump-dir",
        word,
        "--set",
        f"env.NCCL_X={json.dumps(word)}",
        "--resume",
    ]
    assert [line.split()[1:] for line in (folder / word / "slurm/events").read_text().splitlines()] == [
        ["7", "running"],
        ["7", "ended", "3"],
    ]
    assert not list(folder.rglob("pwned"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("host-a: task 0: Exited with exit code 2\nsrun: error: host-b: tasks 2-3: Terminated", 2),
        ("host-a: tasks 0-1: Exited with exit code 143", 143),
        ("host-b: task 2: Killed\nsrun: error: host-a: task 0: Exited with exit code 1", 137),
        ("host-b: task 2: Out Of Memory\nsrun: error: host-a: task 0: Terminated", 137),
        ("Unable to create step", 143),
    ],
)
def test_the_code_of_the_task_that_failed_first(
    capsys: pytest.CaptureFixture[str], folder: Path, said: str, expected: int
) -> None:
    Path("bin").mkdir()
    stand_in = Path("bin/srun")
    stand_in.write_text(f"#!/bin/sh\nprintf 'srun: error: {said}\\n' >&2\nexit 143\n")
    stand_in.chmod(0o755)
    printed = dry_run(capsys, "--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", "out")
    Path("out/slurm").mkdir(parents=True)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "-c", printed.partition("\n")[2]], env=environ).returncode == expected
    assert Path("out/slurm/events").read_text().split()[-2:] == ["ended", str(expected)]


@pytest.mark.parametrize(("given", "expected"), [({"SLURM_CPUS_PER_TASK": "6"}, "6"), ({}, "unset")])
def test_srun_is_told_the_cores_of_a_task(
    capsys: pytest.CaptureFixture[str], folder: Path, given: dict[str, str], expected: str
) -> None:
    Path("bin").mkdir()
    stand_in = Path("bin/srun")
    stand_in.write_text(f'#!/bin/sh\necho "${{SRUN_CPUS_PER_TASK-unset}}" > "{folder}/cores"\n')
    stand_in.chmod(0o755)
    printed = dry_run(capsys, "--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", "out")
    Path("out/slurm").mkdir(parents=True)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **given}
    subprocess.run(["bash", "-c", printed.partition("\n")[2]], env=environ, check=True)
    assert Path("cores").read_text().strip() == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launcher", "pdsh", "run.json"], "invalid choice: 'pdsh'"),
        (["--launcher", "local"], "the following arguments are required: CONFIG"),
        (["--launcher", "local", "--hostfile", "hosts", "run.json"], "--hostfile has no effect with --launcher local"),
        (["--launcher", "mpirun", "run.json"], "needs --hostfile"),
        (["--launcher", "slurm", "run.json"], "needs --gpus-per-node"),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--mpi", "mpich", "run.json"],
            "--mpi has no effect with --launcher slurm",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--partition", "a\n#SBATCH --x", "run.json"],
            "not a value that SLURM could know",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--time", "1;touch pwned", "run.json"],
            "not a value that SLURM could know",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", 'a"b'],
            "choose a name without them",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--launcher-args", "touch pwned", "run.json"],
            "options of sbatch in the form",
        ),
        (
            ["--launcher", "local", "--gpus-per-node", "3", "run.json"],
            "3 processes (--gpus-per-node) are not a multiple of groups 2",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "run.json", "--fsdp", "2"],
            "6 processes (slots of 2 hosts) are not",
        ),
        (
            ["--launcher", "local", "--gpus-per-node", "10", "run.json"],
            "train_batch_size 24 (from the configuration) is not",
        ),
        (
            ["--launcher", "local", "run.json", "--set", "train_batch_size=7"],
            "train_batch_size 7 (from the configuration) is not",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--launcher-args=--nodes=2", "run.json"],
            "'--nodes=2': which ranks there are is",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "--launcher-args=-N2", "run.json"],
            "said by --nodes and --gpus-per-node; leave",
        ),
        (
            ["--launcher", "mpirun", "--hostfile", "hosts", "--launcher-args=-np 4", "run.json"],
            "'-np': which ranks there are is said by",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "--launcher-args=--num_nodes=1", "run.json"],
            "'--num_nodes=1': which ranks",
        ),
        *(
            (
                ["--launcher", launcher, *more, f"--launcher-args={word}", "run.json"],
                f"{word.split()[0]!r}: which ranks there are",
            )
            for launcher, more, words in (
                (
                    "slurm",
                    ("--gpus-per-node", "2"),
                    ("--array=0-3", "--gpus-per-node=4", "--ntasks-per-node=3", "--ntas=3", "-n3"),
                ),
                (
                    "mpirun",
                    ("--hostfile", "hosts"),
                    ("--pernode", "-rf x", ": -n 2", "--default-hostfile x", "-machinefile=x"),
                ),
                (
                    "deepspeed",
                    ("--hostfile", "hosts"),
                    ("--num_gpu=2", "-iw0", "--inc=w0", "--num_accelerators=2", "--exc=w0"),
                ),
            )
            for word in words
        ),
        (
            ["--launcher", "mpirun", "--hostfile", "hosts", "run.json", "--set", "train_batch_size=8"],
            "data ranks 6 (sdp.groups 2 × fsdp 3)",
        ),
        (
            ["--launcher", "slurm", "--nodes", "5", "--gpus-per-node", "2", "run.json"],
            "data ranks 10 (sdp.groups 2 × fsdp 5)",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "--master-addr", "a;b", "run.json"],
            "--master-addr: 'a;b' is no host name",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "--python", "/a b/python", "run.json"],
            "passes it unquoted to remote shells",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "--python", "/a/%h/python", "run.json"],
            "passes it unquoted to remote shells",
        ),
        (
            ["--launcher", "deepspeed", "--hostfile", "hosts", "--launcher-args=--venv_script=/%u/x", "run.json"],
            "passes it through pdsh",
        ),
        (["--launcher", "deepspeed", "--hostfile", "per-cent", "run.json"], "'n%h' is no host name"),
        (["--launcher", "deepspeed", "--hostfile", "local-host", "run.json"], "cannot reach rank 0 at localhost"),
        (["--launcher", "local", "--env", "NCCL_DEBUG", "run.json"], "expected NAME=VALUE"),
        (["--launcher", "local", "--env", "RANK=3", "run.json"], "env.RANK: RANK is the launcher's"),
        (["--launcher", "local", "--env", "A B=3", "run.json"], "is no name of an environment variable"),
        (["--launcher", "local", "--launcher-args", "x", "run.json"], "--launcher-args has no effect"),
        (["--launcher", "mpirun", "--hostfile", "hosts", "--launcher-args", "'", "run.json"], "No closing quotation"),
        (["--launcher", "local", "run.json", "--nproc", "2"], "give --gpus-per-node before CONFIG"),
        (["--launcher", "local", "none.json"], "none.json: no such configuration file"),
        (
            ["--launcher", "mpirun", "--hostfile", "none", "run.json"],
            "--hostfile none: cannot be read (No such file or directory)",
        ),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", "earlier"],
            "earlier already holds a run",
        ),
        (["--launcher", "local", "run.json", "--dump-dir", "earlier"], "earlier already holds a run; pass --resume"),
        (
            ["--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--set", "sdp.capacity=1.5"],
            "sdp.capacity: 1.5 is out of range",
        ),
        (
            ["--launcher", "mpirun", "--hostfile", "hosts", "--mpirun", "./no-mpirun", "run.json"],
            "no-mpirun is not on the PATH",
        ),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    Path("local-host").write_text("localhost slots=2\nworker-1 slots=2\n")
    Path("per-cent").write_text("n%h slots=2\n")
    Path("earlier/checkpoints/step-1").mkdir(parents=True)
    assert main(["launch", "--dry-run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "line", ["A=%h", "A=a%%b", "A=$(touch pwned)", "A=`touch pwned`", 'A="x"', "# comment", "", "export A=1"]
)
def test_deepspeed_env_file_that_the_runner_would_trip_over(capsys: pytest.CaptureFixture[str], line: str) -> None:
    Path(".deepspeed_env").write_text(f"NCCL_DEBUG=INFO\n{line}\n")
    assert main(["launch", "--dry-run", "--launcher", "deepspeed", "--hostfile", "hosts", "run.json"]) == 2
    assert ".deepspeed_env:2:" in capsys.readouterr().err


def test_deepspeed_exports_that_a_remote_shell_would_expand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "$(touch pwned)")
    assert main(["launch", "--dry-run", "--launcher", "deepspeed", "--hostfile", "hosts", "run.json"]) == 2
    assert "UCX_TLS='$(touch pwned)'" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["other_env", "elsewhere/other_env"])
def test_deepspeed_environment_file_of_another_name(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    file = folder / where
    file.parent.mkdir(exist_ok=True)
    file.write_text("NCCL_DEBUG=$(touch pwned)\n")
    monkeypatch.setenv("DS_ENV_FILE", where if file.parent == folder else str(file))
    assert main(["launch", "--dry-run", "--launcher", "deepspeed", "--hostfile", "hosts", "run.json"]) == 2
    assert "other_env:1:" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/a$HOME/b", "/a`touch pwned`", "/a%h/b", "/a%n", "/%u"])
def test_deepspeed_exports_the_search_path_too(path: str) -> None:
    start = Start(["train"], "python", Path("/w"), {"PYTHONPATH": path})
    with pytest.raises(LaunchError, match=r"PYTHONPATH=.*through pdsh and remote shells"):
        deepspeed_command(start, [Host("a", (0,))], Path("hosts"), ("a", 1))


def test_deepspeed_keeps_the_users_ssh_options(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(["train"], "python", Path("/w"))
    monkeypatch.delenv("PDSH_SSH_ARGS_APPEND", raising=False)
    alone = deepspeed_command(start, [Host("a", (0,))], Path("hosts"), ("a", 1))[1]["PDSH_SSH_ARGS_APPEND"]
    assert alone.startswith("-o ServerAliveInterval=")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222 -i key")
    _, settings = deepspeed_command(start, [Host("a", (0,))], Path("hosts"), ("a", 1))
    assert settings == {"PDSH_SSH_ARGS_APPEND": f"-p 2222 -i key {alone}"}


def test_started_ranks_are_not_launched_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--launcher", "local", "run.json"]) == 2
    assert "its ranks run sdp train themselves" in capsys.readouterr().err


def test_search_path_goes_to_every_host() -> None:
    start = Start(["train"], "python", Path("/w"), {"PYTHONPATH": "/a b;c"})
    assert "PYTHONPATH=/a b;c" in mpirun_command(start, [Host("a", (0,))], "openmpi", "mpirun", ("a", 1))
    hydra = mpirun_command(start, [Host("a", (0,))], "mpich", "mpirun", ("a", 1))
    assert hydra[hydra.index("-genv") :][:3] == ["-genv", "PYTHONPATH", "/a b;c"]


def open_mpi(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, local_size: int, size: int = 5) -> None:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_rank_completes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=1, local_size=3)
    settings = place_settings([[0, 1], [1, 2, 3]], "h", "7")
    assert settings == {
        "MASTER_ADDR": "h",
        "MASTER_PORT": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "CUDA_VISIBLE_DEVICES": "1,2,3",
    }


def test_rank_on_another_host_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=0, local_size=2)
    with pytest.raises(LaunchError, match="Open MPI made rank 3 local rank 0, planned was 1 on host number 1"):
        place_settings([[0, 1], [1, 2, 3]], "h", "7")
    open_mpi(monkeypatch, rank=3, local=0, local_size=2, size=4)
    with pytest.raises(LaunchError, match="started 4 processes, planned were 5"):
        place_settings([[0, 1], [1, 2, 3]], "h", "7")


def test_local_ranks_of_unequal_hosts_under_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed numbers them by rank modulo the host's slots: ranks 2, 3, 4 of hosts with 2 and 3 slots as 2, 0, 1."""
    values = {
        "RANK": 2,
        "WORLD_SIZE": 5,
        "LOCAL_RANK": 2,
        "LOCAL_SIZE": 3,
        "CROSS_RANK": 1,
        "MASTER_ADDR": "h",
        "MASTER_PORT": 7,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert place_settings([[0, 1], [0, 1, 2]], "h", "7")["LOCAL_RANK"] == "0"


def test_local_run_ends_as_sdp_train_does(folder: Path) -> None:
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"a text of number {n} " * 9}) + "\n" for n in range(40))
    )
    prepare(
        [str(folder / "texts.jsonl")], folder / "shards", tokenizer="bytes", held_out=0.2, workers=1, progress=False
    )
    model = {
        "name": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "sdp": {"groups": 2, "capacity": 0.5},
        "model": {**model, "max_position_embeddings": 32},
        "data": {"path": "shards", "sequence_length": 32},
        "training": {"steps": 2, "evaluate_batches": 1},
        "env": {"GLOO_SOCKET_IFNAME": "lo"},
    }
    (folder / "small.json").write_text(json.dumps(config))
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    head = [PYTHON, "-P", "-m", "sdp"]
    launched = subprocess.run(
        [*head, "launch", "--launcher", "local", "--gpus-per-node", "2", "--env", "NCCL_DEBUG=a b", "small.json", "--dump-dir", "one run"],
        env=environ, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    assert "environment of every rank: GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=a b" in launched.stderr
    trained = [*head, "train", "small.json", "--set", "sdp.engine=reference", "--dump-dir", "two"]  # in one process
    assert subprocess.run(trained, env=environ, capture_output=True, timeout=240).returncode == 0
    losses = [
        [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        for run in ("one run", "two")
    ]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# What each network needs said beside the address that gloo and NCCL's rendezvous use.
EXAMPLES = {
    "infiniband": ["NCCL_IB_HCA"],
    "roce": ["NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC"],
    "slingshot": ["NCCL_NET", "FI_MR_CACHE_MONITOR", "FI_CXI_DEFAULT_CQ_SIZE"],
    "ethernet": ["NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_for_clusters(folder: Path, name: str) -> None:
    """Each starts a configuration that is there, on every GPU of its nodes, and says what its network needs; nothing is warned of."""
    root = Path(sdp.__path__[0])
    (folder / "sdp").write_text(f'#!/bin/sh\nexec {shlex.quote(PYTHON)} -P -m sdp "$@"\n')
    (folder / "sdp").chmod(0o755)
    (folder / "hosts").write_text("worker-0 slots=8\nworker-1 slots=8\n")
    environ = dict(
        os.environ, PYTHONPATH=str(root.parent), PATH=f"{folder}:{os.environ['PATH']}", HOSTFILE=str(folder / "hosts")
    )
    script = root / f"configs/clusters/{name}.sh"
    shown = subprocess.run([script, "--dry-run"], cwd=root, env=environ, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    text = " ".join(map(decode, shown.stdout.replace("'", "").split()))
    missing = [
        name
        for name in [*EXAMPLES[name], "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
        if f"--set env.{name}=" not in text
    ]
    assert not missing, text
    if name != "ethernet":
        options = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time")
        assert all(f"#SBATCH --{option}=" in shown.stdout for option in options)
