"""Hosts of network namespaces for the tests in ``cluster/``: running commands on them, and the tiny run that all of them start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sdp

SCRIPTS = Path(__file__).parent / "cluster"
SDP = [sys.executable, "-P", "-m", "sdp.launcher.main"]
ON_ETH0 = ["--env", "GLOO_SOCKET_IFNAME=eth0"]
LAUNCH = [*SDP, "launch", *ON_ETH0]
STEPS = 120  # of the undisturbed run that others are compared with: long enough to be disturbed in the middle
_PROGRAMS = ("ip", "nsenter", "unshare", "ssh-keygen", "/usr/sbin/sshd")


class Hosts:
    """host-a to host-d; ``folder`` holds their keys and is the working directory of what runs on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")

    def start(self, *command: str, host: str = "a", log: str = "log") -> subprocess.Popen[str]:
        """Start a command on a host in the folder of the runs, its output in the file ``log`` there."""
        with (self.folder / log).open("w") as output:
            words = [SCRIPTS / "on.sh", self.folder, host, *command]
            return subprocess.Popen(words, cwd=self.folder, env=self.variables, stdout=output, stderr=subprocess.STDOUT, text=True)

    def said(self, *command: str) -> str:
        """What a command on host-a prints; it must succeed."""
        code = finish(self.start(*command, log="said"), 60)
        text = (self.folder / "said").read_text()
        assert code == 0, text
        return text.strip()

    def run(self, *command: str, seconds: float = 240) -> list[float]:
        """Run on host-a to the end; the losses of the dump directory that stands last."""
        code = finish(self.start(*command), seconds)
        assert code == 0, (self.folder / "log").read_text()
        return self.losses(command[-1])

    def losses(self, run: str) -> list[float]:
        """Those that the run has noted so far, by step."""
        metrics = self.folder / run / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]

    def checkpoints(self, run: str) -> list[int]:
        """The steps of the run's finished checkpoints, in their order."""
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self.folder.glob(f"{run}/checkpoints/step-*/state.json"))

    def processes(self, word: str) -> list[int]:
        """What runs on any of the hosts with ``word`` in its command line."""
        found = []
        for host in "abcd":
            pids = subprocess.run(["ip", "netns", "pids", f"{self.folder.name}-{host}"], capture_output=True, text=True, check=True)
            for pid in map(int, pids.stdout.split()):
                with contextlib.suppress(OSError):
                    found += [pid] if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return found

    def plug(self, host: str, state: str) -> None:
        """The cable of a host ``up`` or ``down``: packets vanish without a word."""
        subprocess.run(["ip", "-n", f"{self.folder.name}-{host}", "link", "set", "eth0", state], check=True)


@contextlib.contextmanager
def made_hosts() -> Iterator[Hosts]:
    """Four hosts that see each other at 10.77.0.1 to 10.77.0.4, and a tiny run's corpus and configuration; gone afterwards."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install iproute2 openssh-server openssh-client pdsh openmpi-bin")
    folder = Path(tempfile.mkdtemp(prefix="sdp"))
    try:
        made = subprocess.run([SCRIPTS / "hosts_up.sh", folder], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"NOT TESTED, this machine makes no network namespaces: {made.stderr.strip()}")
        _prepare(folder)
        yield Hosts(folder)
    finally:
        subprocess.run([SCRIPTS / "hosts_down.sh", folder], check=False)
        shutil.rmtree(folder)


def finish(process: subprocess.Popen[str], seconds: float) -> int:
    """The exit code; the process is killed where it does not end in time, which raises."""
    try:
        return process.wait(seconds)
    finally:
        process.kill()


def _prepare(folder: Path) -> None:
    (folder / "hostfile").write_text("host-a slots=2\nhost-b slots=2\n")
    (folder / "others").write_text("host-c slots=2\nhost-d slots=2\n")
    (folder / "four").write_text("".join(f"host-{name} slots=1\n" for name in "abcd"))
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a text of number {number} " * 9}) + "\n" for number in range(40)))
    words = ["prepare", "--input", texts, "--output", folder / "shards", "--tokenizer", "bytes", "--held-out", "0.2"]
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    subprocess.run([*SDP, *words], env=environ, check=True, capture_output=True)
    model = {"name": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "sdp": {"groups": 2, "capacity": 0.5},
        "model": {**model, "max_position_embeddings": 32},
        "data": {"path": "shards", "sequence_length": 32},
        "training": {"steps": STEPS, "evaluate_batches": 1},
    }
    (folder / "small.json").write_text(json.dumps(config))
