"""``sdp launch``: what is refused, a run under ``local``, and the examples for clusters."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.launcher.cluster.rank import decode
from sdp.tests.support.forks.command import run_forked
from sdp.tests.support.small_runs import make_corpus, read_losses, tiny_config
from sdp.tools.cli import main

pytestmark = pytest.mark.usefixtures("folder")
PYTHON = sys.executable


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pdsh run.json", "invalid choice: 'pdsh'"),
        ("local", "the following arguments are required: CONFIG"),
        ("local --hostfile hosts run.json", "--hostfile has no effect with --launcher local"),
        ("mpirun run.json", "needs --hostfile"),
        ("slurm run.json", "needs --gpus-per-node"),
        ("slurm --gpus-per-node 2 --mpi mpich run.json", "--mpi has no effect with --launcher slurm"),
        ("slurm --gpus-per-node 2 --partition 'a\n#SBATCH --x' run.json", "cannot be a value for SLURM"),
        ("slurm --gpus-per-node 2 --time '1;touch pwned' run.json", "cannot be a value for SLURM"),
        ("slurm --gpus-per-node 2 run.json --dump-dir 'a\"b'", "choose a name without them"),
        ("slurm --gpus-per-node 2 --launcher-args 'touch pwned' run.json", "options of sbatch in the form"),
        ("local --gpus-per-node 3 run.json", "3 processes (--gpus-per-node) are not a multiple of groups 2"),
        ("deepspeed --hostfile hosts run.json --fsdp 2", "6 processes (slots of 2 hosts) are not"),
        ("local --gpus-per-node 10 run.json", "train_batch_size 24 (from the configuration) is not"),
        ("local run.json --set train_batch_size=7", "train_batch_size 7 (from the configuration) is not"),
        *(
            (f"{start} '--launcher-args={word}' run.json", f"{word.split()[0]!r}: the ranks are chosen by")
            for start, words in (
                ("slurm --gpus-per-node 2", "--nodes=2,-N2,--array=0-3,--gpus-per-node=4,--ntasks-per-node=3,--ntas=3"),
                ("mpirun --hostfile hosts", "-np 4,--pernode,-rf x,: -n 2,--default-hostfile x,-machinefile=x"),
                ("deepspeed --hostfile hosts", "--num_nodes=1,--num_gpu=2,-iw0,--inc=w0,--num_accelerators=2,--exc=w0"),
            )
            for word in words.split(",")
        ),
        ("mpirun --hostfile hosts run.json --set train_batch_size=8", "data ranks 6 (sdp.groups 2 × fsdp 3)"),
        ("slurm --nodes 5 --gpus-per-node 2 run.json", "data ranks 10 (sdp.groups 2 × fsdp 5)"),
        ("mpirun --hostfile hosts --master-port 70000 run.json",
            "argument --master-port: '70000' is not a port; use a number from 1 to 65535"),
        ("deepspeed --hostfile hosts --master-addr 'a;b' run.json", "--master-addr: 'a;b' is not a host name"),
        ("deepspeed --hostfile hosts --python '/a b/python' run.json", "passes it unquoted to remote shells"),
        ("deepspeed --hostfile hosts --python /a/%h/python run.json", "passes it unquoted to remote shells"),
        ("deepspeed --hostfile hosts --launcher-args=--venv_script=/%u/x run.json", "passes it through pdsh"),
        ("deepspeed --hostfile per-cent run.json", "'n%h' is not a host name"),
        ("deepspeed --hostfile local-host run.json", "cannot reach rank 0 at localhost"),
        ("local --env NCCL_DEBUG run.json", "expected NAME=VALUE"),
        ("local --env RANK=3 run.json", "env.RANK: RANK cannot be set here"),
        ("local --env CXX=./x run.json", "env.CXX: CXX cannot be set here"),
        ("local --env 'A B=3' run.json", "cannot be the name of an environment variable"),
        ("local --launcher-args x run.json", "--launcher-args has no effect"),
        ("mpirun --hostfile hosts --launcher-args ''\"'\"'' run.json", "No closing quotation"),
        ("local run.json --nproc 2", "give --gpus-per-node before CONFIG"),
        ("local none.json", "none.json: no such configuration file"),
        ("mpirun --hostfile none run.json", "--hostfile none: cannot be read (No such file or directory)"),
        ("slurm --gpus-per-node 2 run.json --dump-dir earlier", "earlier already holds a run"),
        ("local run.json --dump-dir earlier", "earlier already holds a run; pass --resume"),
        ("slurm --gpus-per-node 2 run.json --set sdp.capacity=1.5", "sdp.capacity: 1.5 is out of range"),
        ("mpirun --hostfile hosts --mpirun ./no-mpirun run.json", "no-mpirun is not on the PATH"),
    ],
)  # fmt: skip
def test_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    Path("local-host").write_text("localhost slots=2\nworker-1 slots=2\n")
    Path("per-cent").write_text("n%h slots=2\n")
    Path("earlier/checkpoints/step-1").mkdir(parents=True)
    assert main(["launch", "--dry-run", "--launcher", *shlex.split(words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("where", [".deepspeed_env", "other_env", "elsewhere/other_env"])
@pytest.mark.parametrize("line", ["A=%h", "A=a%%b", "A=$(touch pwned)", "A=`touch pwned`", 'A="x"', "# comment", ""])
def test_deepspeed_env_file_that_the_runner_would_trip_over(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, line: str
) -> None:
    (folder / where).parent.mkdir(exist_ok=True)
    (folder / where).write_text(f"NCCL_DEBUG=INFO\n{line}\n")
    if where != ".deepspeed_env":
        monkeypatch.setenv("DS_ENV_FILE", str(folder / where) if "/" in where else where)
    assert main(["launch", "--dry-run", "--launcher", "deepspeed", "--hostfile", "hosts", "run.json"]) == 2
    assert f"{where.rpartition('/')[2]}:2:" in capsys.readouterr().err


def test_deepspeed_exports_that_a_remote_shell_would_expand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "$(touch pwned)")
    assert main(["launch", "--dry-run", "--launcher", "deepspeed", "--hostfile", "hosts", "run.json"]) == 2
    assert "UCX_TLS='$(touch pwned)'" in capsys.readouterr().err


def test_started_ranks_are_not_launched_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--launcher", "local", "run.json"]) == 2
    assert "use sdp train here" in capsys.readouterr().err


def test_local_run_ends_as_forked_commands_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local launcher starts new interpreters, even if the command was forked. A forked ``sdp
    train`` has the same losses, and sees nothing of the commands before it, of which one fails.
    """
    config = tiny_config(make_corpus(folder), groups=2, steps=3) | {"env": {"GLOO_SOCKET_IFNAME": "lo"}}
    config["data"]["path"] = "shards"
    (folder / "small.json").write_text(json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_forked("train", "small.json", "--dump-dir", "refused", "--set", "sdp.groups=3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    monkeypatch.delenv("WORLD_SIZE")
    for name, value in (("PROCID", "0"), ("LOCALID", "0"), ("NTASKS", "1"), ("STEP_ID", "0")):  # of srun jupyter
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = ["--launcher", "local", "--gpus-per-node", "2", "--env", "NCCL_DEBUG=a b", "small.json"]
    launched = run_forked("launch", *words, "--dump-dir", "one run")
    assert launched.returncode == 0, launched.stderr
    assert "2 process(es)" in launched.stderr
    assert "environment of every rank: GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=a b" in launched.stderr
    trained = run_forked("train", "small.json", "--dump-dir", "two")
    assert trained.returncode == 0, trained.stderr
    losses = read_losses(Path("one run"))
    assert len(losses) == 3
    assert losses == read_losses(Path("two"))


# What each network needs said beside the address that gloo and NCCL's rendezvous use.
EXAMPLES = {
    "infiniband": ["NCCL_IB_HCA"],
    "roce": ["NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC"],
    "slingshot": ["NCCL_NET", "FI_MR_CACHE_MONITOR", "FI_CXI_DEFAULT_CQ_SIZE"],
    "ethernet": ["NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"],
    "internet": ["NCCL_IB_DISABLE"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_for_clusters(folder: Path, name: str) -> None:
    """Each says what its network needs; nothing is warned of."""
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
    if name == "internet":
        assert 'sdp.sync={"every": 128, "fragments": 4,' in shown.stdout
    if name not in ("ethernet", "internet"):
        options = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time")
        assert all(f"#SBATCH --{option}=" in shown.stdout for option in options)
