"""Real launchers over two hosts in network namespaces end with the losses of a local start; a host that vanishes ends the run.

Skipped, loudly, where a machine cannot make such hosts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sdp

HERE = Path(__file__).parent
PROGRAMS = ("ip", "nsenter", "unshare", "ssh-keygen", "/usr/sbin/sshd", "pdsh")
SDP = [sys.executable, "-P", "-m", "sdp.launcher.main"]
ON_ETH0 = ["--env", "GLOO_SOCKET_IFNAME=eth0"]
pytestmark = pytest.mark.cluster


class Hosts:
    """host-a and host-b; ``folder`` holds their keys and is the working directory of what runs on them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_a(self, *command: str | Path, log: Path | None = None) -> subprocess.Popen[str]:
        """Start a command on host-a in the folder of the runs, its output in ``log``."""
        environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        with (log or self.folder / "log").open("w") as output:
            words = [HERE / "on.sh", self.folder, "a", *command]
            return subprocess.Popen(words, cwd=self.folder, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True)

    def unplug_b(self) -> None:
        """The cable of host-b: packets vanish without a word."""
        subprocess.run(["ip", "-n", f"{self.folder.name}-b", "link", "set", "eth0", "down"], check=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts that see each other at 10.77.0.1 and 10.77.0.2, two slots each, and a tiny run's corpus and configuration."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install iproute2 openssh-server openssh-client pdsh openmpi-bin")
    folder = Path(tempfile.mkdtemp(prefix="sdp"))
    try:
        made = subprocess.run([HERE / "hosts_up.sh", folder], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"NOT TESTED, this machine makes no network namespaces: {made.stderr.strip()}")
        _prepare(folder)
        yield Hosts(folder)
    finally:
        subprocess.run([HERE / "hosts_down.sh", folder], check=False)
        shutil.rmtree(folder)


def _prepare(folder: Path) -> None:
    (folder / "hostfile").write_text("host-a slots=2\nhost-b slots=2\n")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a text of number {number} " * 9}) + "\n" for number in range(40)))
    words = ["prepare", "--input", texts, "--output", folder / "shards", "--tokenizer", "bytes", "--held-out", "0.2"]
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    subprocess.run([sys.executable, "-P", "-m", "sdp.launcher.main", *words], env=environ, check=True, capture_output=True)
    model = {"name": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "sdp": {"groups": 2, "capacity": 0.5},
        "model": {**model, "max_position_embeddings": 32},
        "data": {"path": "shards", "sequence_length": 32},
        "training": {"steps": 4, "evaluate_batches": 1},
    }
    (folder / "small.json").write_text(json.dumps(config))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def finish(process: subprocess.Popen[str], seconds: float) -> int:
    try:
        return process.wait(seconds)
    finally:
        process.kill()


def run(hosts: Hosts, *command: str) -> list[float]:
    """Run to the end; the losses of the dump directory that stands last."""
    code = finish(hosts.on_a(*command), 240)
    assert code == 0, (hosts.folder / "log").read_text()
    return losses(hosts.folder / command[-1])


def test_same_losses_under_every_launcher(hosts: Hosts) -> None:
    expected = run(hosts, *SDP, "launch", "--launcher", "local", "--gpus-per-node", "4", "small.json", "--dump-dir", "local")
    assert len(expected) == 4
    on_hosts = [*SDP, "launch", *ON_ETH0, "--hostfile", "hostfile"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "2", "--rdzv-backend", "static"]
    torchrun += ["--master-addr", "host-a", "--master-port", "29500"]
    train = ["-m", "sdp.launcher.main", "train", "small.json", "--set", "env.GLOO_SOCKET_IFNAME=eth0", "--dump-dir", "torchrun"]
    commands = {"deepspeed": [*on_hosts, "--launcher", "deepspeed", "small.json", "--dump-dir", "out; $(touch pwned) 'x'"]}
    if shutil.which("mpirun.openmpi"):
        mpirun = ["--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root"]
        commands["Open MPI"] = [*on_hosts, *mpirun, "small.json", "--dump-dir", "a & b"]
    if shutil.which("mpiexec.mpich"):
        commands["MPICH"] = [*on_hosts, "--launcher", "mpirun", "--mpirun", "mpiexec.mpich", "small.json", "--dump-dir", "mpich"]
    for name, command in commands.items():
        assert run(hosts, *command) == pytest.approx(expected, rel=1e-6), name
    on_b = " ".join([*torchrun, "--node-rank", "1", *train])
    script = f"ssh host-b 'cd {hosts.folder}; PYTHONPATH='$PYTHONPATH' OMP_NUM_THREADS=1 {on_b}' > on-b.log 2>&1 & exec \"$@\""
    assert run(hosts, "sh", "-c", script, "sh", *torchrun, "--node-rank", "0", *train) == pytest.approx(expected, rel=1e-6)
    assert not list(hosts.folder.rglob("pwned"))


def test_a_host_that_vanishes_is_noticed(hosts: Hosts) -> None:
    limits = ["--set", "training.steps=100000", "training.step_timeout=15"]
    command = [*SDP, "launch", *ON_ETH0, "--hostfile", "hostfile", "--launcher", "deepspeed", "small.json", *limits, "--dump-dir", "run"]
    process = hosts.on_a(*command)
    metrics, deadline = hosts.folder / "run/metrics.jsonl", time.monotonic() + 180
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, (hosts.folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    hosts.unplug_b()
    code = finish(process, 90)  # 15 seconds to notice, 30 silent seconds of ssh
    assert code != 0
    assert "rank 0 on host-a, step " in (hosts.folder / "log").read_text()
    assert "no progress for 15 s" in (hosts.folder / "log").read_text()
