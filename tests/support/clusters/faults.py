"""A run over two hosts that is stopped, loses ranks and a host, and is resumed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from sdp.tests.support.clusters.hosts import INTEL_MPIRUN, LAUNCH, PAUSE, Hosts, finish, is_rank
from sdp.tests.support.processes import until

SECONDS = 240.0  # the limit for something that takes a few seconds on idle cores
STEPS = 40
OPEN_MPI = ["mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root"]
MPICH = ["mpirun", "--mpirun", "mpiexec.mpich"]
INTEL_MPI = ["mpirun", "--mpirun", INTEL_MPIRUN]
LAUNCHERS = {
    "deepspeed": ["deepspeed"], "Open MPI": OPEN_MPI, "MPICH": MPICH, "torchrun": ["torchrun"],
    "Intel MPI": INTEL_MPI,
}  # fmt: skip
SLOW = ("MPICH", "Intel MPI")  # further flavours of mpirun, which are not tested every time
_FIRST_SIGNAL = {"deepspeed": signal.SIGINT}  # other launchers get SIGTERM
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "static", "--master-addr", "host-a"]


@dataclass
class Life:
    """A run that is started repeatedly, with rank 0 on host-a and rank 1 on another host."""

    hosts: Hosts
    name: str
    launcher: list[str]
    host: str  # of rank 1
    port: int

    def start(self, phase: str, *words: str) -> list[subprocess.Popen[str]]:
        """Start ``sdp train small.json`` with ``words`` under the launcher.

        Returns the processes that it takes, beginning with the one on host-a.
        """
        train = ["small.json", "--set", f"training.steps={STEPS}", *words, "--dump-dir", self.name]
        if self.launcher != ["torchrun"]:
            hosts = ["--hostfile", f"with-{self.host}", "--master-port", str(self.port)]
            return [self.hosts.start(*LAUNCH, "--launcher", *self.launcher, *hosts, *train, log=self.log(phase))]
        started = []
        for node, host in enumerate(["a", self.host]):
            place = [
                "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-port", str(self.port),
            ]  # fmt: skip
            command = [*TORCHRUN, *place, "-m", "sdp", "train", *train, "--set", "env.GLOO_SOCKET_IFNAME=eth0"]
            started.append(self.hosts.start(*command, log=self.log(phase) + "-b" * node, host=host))
        return started

    def log(self, phase: str) -> str:
        return f"{self.name}-{phase}.log"

    def said(self, phase: str) -> str:
        return "".join(path.read_text() for path in sorted(self.hosts.folder.glob(self.log(phase) + "*")))

    @property
    def steps(self) -> int:
        return len(self.hosts.losses(self.name))

    def reach(self, started: list[subprocess.Popen[str]], phase: str, reached: Callable[[], bool]) -> None:
        def look() -> bool:
            assert started[0].poll() is None, f"{self.name}, {phase}: ended too early: {self.said(phase)}"
            return reached()

        until(look, SECONDS, 0.005 if reached == self.is_saving else PAUSE)  # a save takes only a moment

    def check_end(self, started: list[subprocess.Popen[str]], phase: str, seconds: float = 120) -> int:
        """Return the exit code on host-a after no process of the run is left anywhere."""
        code = finish(started[0], seconds)
        for other in started[1:]:
            assert finish(other, 120) != 0, self.said(phase)
        self.hosts.nothing_left(self.name, f"a{self.host}", self.port, 120)
        return code

    def has_no_room(self) -> None:
        """Start a model that fits no machine: every rank reports it, and the job fails."""
        phase = "full"
        sizes = ["model.hidden_size=65536", "model.intermediate_size=16777216"]  # 4.4 TB a matrix
        code = self.check_end(self.start(phase, "--set", *sizes), phase, SECONDS)
        assert code not in (0, 2), self.said(phase)
        assert "sdp: error: rank 0 on host-a, step 0, building the model: out of memory" in self.said(phase), self.said(
            phase
        )

    def is_stopped_by(self, number: signal.Signals, resume: list[str]) -> None:
        """Send a signal to the launcher: the run saves its last step."""
        phase, before = number.name, self.steps
        started = self.start(phase, *resume)
        self.reach(started, phase, lambda: self.steps > before + 1)
        started[0].send_signal(number)
        code = self.check_end(started, phase)
        assert code == 128 + number or (self.launcher == ["torchrun"] and code != 0), self.said(phase)
        assert before < self.hosts.checkpoints(self.name)[-1] == self.steps, self.said(phase)

    def loses_a_rank(self) -> None:
        """Kill a rank as the kernel does when memory is short: no process is left."""
        before = self.steps
        started = self.start("killed", "--resume")
        self.reach(started, "killed", lambda: self.steps > before + 1)
        (rank,) = (pid for pid in self.hosts.processes(self.name, self.host) if is_rank(pid))
        os.kill(rank, signal.SIGKILL)
        assert self.check_end(started, "killed") not in (0, 2), self.said("killed")
        said = self.said("killed")
        assert re.search(rf"{self.killed}|rank 0 on host-a, step \d+, \w+: another rank is gone \(.*10\.77\.0", said), (
            said
        )

    @property
    def killed(self) -> str:
        """A pattern of what the launcher says when a rank is killed."""
        deepspeed = rf"host-{self.host}: .* exits with return code = -9"
        return rf"{deepspeed}|rank 1 .* on node host-{self.host} exited on signal 9|Killed \(signal 9\)"

    def hangs(self) -> None:
        """Stop a rank, which cannot end itself: the other one reports it."""
        before = self.steps
        started = self.start("hung", "--resume")
        self.reach(started, "hung", lambda: self.steps > before + 1)
        (rank,) = (pid for pid in self.hosts.processes(self.name, self.host) if is_rank(pid))
        os.kill(rank, signal.SIGSTOP)
        assert self.check_end(started, "hung") not in (0, 2), self.said("hung")
        assert "no progress for 8 s" in self.said("hung")

    def loses_a_host(self, *settings: str, reached: Callable[[], bool] | None = None) -> str:
        """Unplug the host of rank 1; return the output."""
        before = self.steps
        started = self.start("lost", *["--resume"][: self.steps], *settings)
        self.reach(started, "lost", reached or (lambda: self.steps > before + 1))
        self.hosts.plug(self.host, "down")
        try:
            # A rank notices after 8 seconds, ssh or mpirun after 30. Processes on the lost host end
            # themselves.
            assert self.check_end(started, "lost", SECONDS) not in (0, 2), self.said("lost")
        finally:
            self.hosts.plug(self.host, "up")
        said = self.said("lost")
        assert "rank 0 on host-a, step " in said, said
        assert "no progress for 8 s" in said, said
        return said

    def has_gone_on(self) -> bool:
        """Whether the run has taken steps after its newest checkpoint."""
        saved = self.hosts.checkpoints(self.name)
        return bool(saved) and self.steps > saved[-1] + 1

    def is_saving(self) -> bool:
        return any(self.hosts.folder.glob(f"{self.name}/checkpoints/.step-*"))

    def goes_on_to_its_end(self, expected: list[float]) -> None:
        started = self.start("end", "--resume")
        assert [finish(process, SECONDS) for process in started] == [0] * len(started), self.said("end")
        assert f"resumed from {self.name}/checkpoints/step-" in self.said("end")
        assert self.hosts.losses(self.name) == pytest.approx(expected[:STEPS], rel=1e-6)


def live(life: Life, expected: Future[list[float]]) -> str:
    """Disturb a run, resume it after each disturbance, and return the output about the lost host.

    The run is stopped by a signal and loses a host; under Open MPI it also loses a rank. torchrun
    leaves signals to its ranks. :func:`meet_the_rest` has the other disturbances, because every
    start keeps all cores busy for seconds.
    """
    if life.launcher != ["torchrun"]:
        life.is_stopped_by(_FIRST_SIGNAL.get(life.launcher[0], signal.SIGTERM), [])
    if life.launcher == OPEN_MPI:
        life.loses_a_rank()
        said = life.loses_a_host("--set", "training.save_every=1", "training.step_timeout=100", reached=life.is_saving)
        assert ", checkpoint: no progress" in said, said
    else:
        said = life.loses_a_host(reached=life.has_gone_on)
    life.goes_on_to_its_end(expected.result())
    return said


def meet_the_rest(life: Life) -> None:
    """Try no memory, both signals, a lost rank and a hanging rank."""
    life.has_no_room()
    life.is_stopped_by(signal.SIGTERM, [])
    life.is_stopped_by(signal.SIGINT, ["--resume"])
    life.loses_a_rank()
    if life.launcher != ["torchrun"]:  # its process on the other host waits for the stopped rank
        life.hangs()
