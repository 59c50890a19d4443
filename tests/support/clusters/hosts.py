"""Hosts made of network namespaces, for the tests in ``cluster/``, and the small run on them."""

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
from sdp.tests.support.processes import until, written_lines

SCRIPTS = Path(__file__).parents[2] / "cluster"
SDP = [sys.executable, "-P", "-m", "sdp"]
ON_ETH0 = ["--env", "GLOO_SOCKET_IFNAME=eth0"]
LAUNCH = [*SDP, "launch", *ON_ETH0]
# Three short steps of the quickstart on the hosts' own shards. The value of --dump-dir comes last.
QUICKSTART = [str(Path(sdp.__path__[0]) / "configs/quickstart.json"), "--set"]
QUICKSTART += ["data.path=shards", "data.tokenizer=bytes", "data.vocab_size=257", "data.sequence_length=64"]
QUICKSTART += ["training.steps=3"]
QUICKSTART += ["training.evaluate_batches=1", "training.evaluate_every=0", "training.save_every=0", "--dump-dir"]
STEPS = 60  # of the undisturbed run; other runs are disturbed several times within these steps
_PROGRAMS = ("ip", "tc", "ss", "nsenter", "unshare", "ssh-keygen", "/usr/sbin/sshd")
INTEL_MPIRUN = str(Path(sys.prefix) / "intel-mpi/bin/mpiexec.hydra")
_NEEDED = {
    "deepspeed": ("pdsh", "apt-get install pdsh"),
    "Open MPI": ("mpirun.openmpi", "apt-get install openmpi-bin"),
    "MPICH": ("mpiexec.mpich", "apt-get install mpich"),
    "Intel MPI": (INTEL_MPIRUN, f"pip install --no-deps --target {Path(sys.prefix) / 'intel-mpi'} impi-rt"),
}
# SLURM uses a to d, disturbed runs e to i, test_hosts.py a and j to l, test_service.py a, j and k.
_NAMES = "abcdefghijkl"
PAUSE = 0.25  # seconds between two checks of something that takes seconds; the cores have other work


class Hosts:
    """host-a to host-l. All commands run in ``folder``, which holds their keys."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = dict(
            os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"
        )

    def start(self, *command: str, log: str, host: str = "a") -> subprocess.Popen[str]:
        """Start a command on a host. Its output goes to the file ``log``."""
        with (self.folder / log).open("w") as output:
            words = [SCRIPTS / "on.sh", self.folder, host, *command]
            return subprocess.Popen(
                words, cwd=self.folder, env=self.variables, stdout=output, stderr=subprocess.STDOUT, text=True
            )

    def said(self, *command: str) -> str:
        """Return what a command on host-a prints; it must succeed."""
        words = [SCRIPTS / "on.sh", self.folder, "a", *command]
        ended = subprocess.run(words, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def run(self, *command: str, seconds: float = 240) -> list[float]:
        """Run a command on host-a to its end; return the losses in its last word."""
        log = f"{Path(command[-1]).name}.log"
        code = finish(self.start(*command, log=log), seconds)
        assert code == 0, (self.folder / log).read_text()
        return self.losses(command[-1])

    def losses(self, run: str) -> list[float]:
        return [line["loss"] for line in written_lines(self.folder / run / "metrics.jsonl")]

    def checkpoints(self, run: str) -> list[int]:
        return sorted(
            int(path.parent.name.removeprefix("step-"))
            for path in self.folder.glob(f"{run}/checkpoints/step-*/state.json")
        )

    def processes(self, word: str, hosts: str) -> list[int]:
        """Return the processes on the hosts that have ``word`` in their command line."""
        found = []
        for host in hosts:
            pids = subprocess.run(
                ["ip", "netns", "pids", f"{self.folder.name}-{host}"], capture_output=True, text=True, check=True
            )
            for pid in map(int, pids.stdout.split()):
                with contextlib.suppress(OSError):
                    found += [pid] if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
        return found

    def nothing_left(self, run: str, hosts: str, port: int, seconds: float) -> None:
        """Wait until no process of the run is left; check that nothing listens on its port."""
        until(lambda: not self.processes(run, hosts), seconds, PAUSE)
        assert not self.said("ss", "--no-header", "--listening", "--tcp", f"sport = :{port}")

    def plug(self, host: str, state: str) -> None:
        """Set the link of a host ``up`` or ``down``. A link that is down drops packets silently."""
        subprocess.run(["ip", "-n", f"{self.folder.name}-{host}", "link", "set", "eth0", state], check=True)


@contextlib.contextmanager
def made_hosts() -> Iterator[Hosts]:
    """Make 12 hosts with addresses 10.77.0.1 to 10.77.0.12, and a small run's data and
    configuration.

    All are removed afterwards.
    """
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(
            f"NOT TESTED, no {', '.join(missing)}: apt-get install iproute2 openssh-server openssh-client pdsh "
            "openmpi-bin"
        )
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


def needs(launcher: str) -> None:
    if (remedy := what_installs(launcher)) is not None:
        pytest.skip(f"NOT TESTED, no {launcher}: {remedy}")


def what_installs(launcher: str) -> str | None:
    """Return the command that installs the launcher, or None if its program is there."""
    program, command = _NEEDED.get(launcher, (sys.executable, ""))
    return command if shutil.which(program) is None else None


def finish(process: subprocess.Popen[str], seconds: float) -> int:
    """Return the exit code. A process that does not end in time is killed."""
    try:
        return process.wait(seconds)
    finally:
        process.kill()


def is_rank(pid: int) -> bool:
    """Whether the process is ``sdp train`` itself, not one that started it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:5] == [b"-m", b"sdp", b"train"]


def _prepare(folder: Path) -> None:
    (folder / "two").write_text("host-a slots=2\nhost-j slots=2\n")
    (folder / "four").write_text("".join(f"host-{name} slots=1\n" for name in "ajkl"))
    for name in _NAMES[1:]:
        (folder / f"with-{name}").write_text(f"host-a slots=1\nhost-{name} slots=1\n")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a text of number {number} " * 9}) + "\n" for number in range(240)))
    words = ["prepare", "--input", texts, "--output", folder / "shards", "--tokenizer", "bytes", "--held-out", "0.2"]
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    subprocess.run([*SDP, *words], env=environ, check=True, capture_output=True)
    model = {
        "name": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "zero_optimization": {"stage": 3},
        "sdp": {"groups": 2, "capacity": 0.5},
        "model": {**model, "max_position_embeddings": 64},
        "data": {"path": "shards", "sequence_length": 64},
        "training": {"steps": STEPS, "evaluate_batches": 1, "save_every": 10, "step_timeout": 8, "save_timeout": 8},
    }
    (folder / "small.json").write_text(json.dumps(config))
