"""An elastic run over four hosts that lose each other, for the tests in ``cluster/``.

Each host has one group, which ``configs/clusters/elastic.sh`` launches, each by another launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sdp
from sdp.tests.support.clusters.hosts import HEARTBEAT, PAUSE, SDP, Hosts, is_rank
from sdp.tests.support.processes import until, written_lines

SECONDS = 300.0  # the limit for something that takes a few seconds on idle cores
CUT_SECONDS = 20.0
SCRIPT = str(Path(sdp.__path__[0]) / "configs/clusters/elastic.sh")
COORDINATOR, PORT = "10.77.0.13", 29400  # on host-m
RUN = "lost-groups"
TRAIN = ["train", "elastic.json", "--dump-dir", RUN]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "sdp"]
LAUNCHES = {
    "m": [*SDP, *TRAIN],
    "n": [*TORCHRUN, *TRAIN],
    "o": [
        *SDP, "launch", "--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root",
        "--hostfile", "only-o", *TRAIN[1:],
    ],
    "p": [*SDP, "launch", "--launcher", "deepspeed", "--hostfile", "only-p", *TRAIN[1:]],
}  # fmt: skip


class LostGroups:
    """The run: one group on each of host-m to host-p, and the coordinator on host-m."""

    def __init__(self, hosts: Hosts, stack: ExitStack):
        self._hosts, self._stack = hosts, stack
        (hosts.folder / "token").write_text("a secret that the groups share")
        self.groups = {
            host: self.start(host, SCRIPT, *words, log=f"{RUN}-{host}.log", group=group)
            for group, (host, words) in enumerate(LAUNCHES.items())
        }
        self._coordinators = 0
        self.coordinate()

    def start(self, host: str, *words: str, log: str, group: int | None = None) -> subprocess.Popen[str]:
        told = [f"SDP_ELASTIC_COORDINATOR={COORDINATOR}:{PORT}", f"SDP_ELASTIC_TOKEN_FILE={self._hosts.folder}/token"]
        told += [f"SDP_ELASTIC_GROUP={group}"] if group is not None else []
        process = self._hosts.start("env", *told, *words, log=log, host=host)
        self._stack.callback(process.kill)
        return process

    def coordinate(self) -> None:
        """Start the coordinator, at the same address each time."""
        self._coordinators += 1
        words = ["coordinate", "elastic.json", "--bind", f"{COORDINATOR}:{PORT}", "--dump-dir", RUN]
        self.coordinator = self.start("m", *SDP, *words, log=f"{RUN}-coordinator-{self._coordinators}.log")

    def harm(self) -> subprocess.Popen[str]:
        """Let twenty hostile clients on another host begin."""
        words = [sys.executable, "-P", "-m", "sdp.tests.support.clusters.hostile", COORDINATOR, str(PORT), "token"]
        process = self.start("p", *words, log="hostile.log")
        self.until(lambda: "they are here" in (self._hosts.folder / "hostile.log").read_text())
        return process

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._hosts.folder.glob(f"{RUN}-*.log")))

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return written_lines(self._hosts.folder / RUN / "metrics.jsonl")

    def until(self, condition: Callable[[], Any]) -> Any:
        try:
            return until(condition, SECONDS, PAUSE)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run says:\n{self.said}") from None

    def steps(self, count: int, groups: int) -> list[dict[str, Any]]:
        """Wait for ``count`` more steps, the last one with so many groups; return all lines."""
        goal = len(self.lines()) + count
        return self.until(
            lambda: lines if len(lines := self.lines()) >= goal and lines[-1]["groups"] == groups else None
        )

    def ranks(self, host: str) -> list[int]:
        return [pid for pid in self._hosts.processes(RUN, host) if is_rank(pid)]


def four_hosts_lose_each_other(hosts: Hosts) -> None:
    """The others go on after each loss, and take back what returns."""
    with ExitStack() as stack:
        run = LostGroups(hosts, stack)
        run.steps(3, groups=4)
        _hostile_clients_delay_no_step(run)
        _a_host_loses_its_processes(run)
        _a_host_loses_its_link(hosts, run)
        _the_coordinator_is_killed(run)
        _a_group_is_told_to_stop_alone(run)
        _all_groups_are_told_to_stop(hosts, run)


def _hostile_clients_delay_no_step(run: LostGroups) -> None:
    before = run.lines()[-1]["generation"]
    clients = run.harm()
    assert run.steps(10, groups=4)[-1]["generation"] == before, run.said
    assert clients.poll() is None
    clients.kill()


def _a_host_loses_its_processes(run: LostGroups) -> None:
    for pid in run.ranks("o"):
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: "group 2 on host-o was lost after step" in run.said)
    assert any(line["groups"] == 3 for line in run.steps(1, groups=4)), run.said
    assert "elastic.sh: group 2: ended with exit code" in run.said


def _a_host_loses_its_link(hosts: Hosts, run: LostGroups) -> None:
    hosts.plug("n", "down")
    try:
        began, before = time.monotonic(), len(run.lines())
        run.until(lambda: "group 1 on host-n was lost after step" in run.said)
        assert f"no heartbeat for {HEARTBEAT} s" in run.said
        run.steps(2, groups=3)
        time.sleep(max(0.0, CUT_SECONDS - (time.monotonic() - began)))
    finally:
        hosts.plug("n", "up")
    assert {line["groups"] for line in run.lines()[before + 1 :]} <= {3, 4}
    run.steps(2, groups=4)
    assert "group 1 was cut off" in run.said


def _the_coordinator_is_killed(run: LostGroups) -> None:
    """No group is lost, however long it is away, up to ``wait_seconds``."""
    before = run.lines()[-1]["generation"]
    run.coordinator.send_signal(signal.SIGKILL)
    run.coordinator.wait()
    time.sleep(HEARTBEAT + 2)
    run.coordinate()
    assert {line["generation"] - before for line in run.steps(3, groups=4)[-3:]} <= {1, 2}, run.said


def _a_group_is_told_to_stop_alone(run: LostGroups) -> None:
    """As if its node were taken away."""
    run.groups["m"].terminate()
    run.until(lambda: "group 0 on host-m was lost after step" in run.said)
    assert "(it was told to stop)" in run.said
    assert run.groups["m"].wait(SECONDS) == 128 + signal.SIGTERM
    run.steps(2, groups=3)
    run.groups["m"] = run.start("m", SCRIPT, *LAUNCHES["m"], log=f"{RUN}-m-again.log", group=0)
    run.steps(2, groups=4)


def _all_groups_are_told_to_stop(hosts: Hosts, run: LostGroups) -> None:
    for process in run.groups.values():
        process.terminate()
    for process in run.groups.values():
        assert process.wait(SECONDS) != 0
    assert run.coordinator.wait(SECONDS) == 0, run.said
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert hosts.checkpoints(RUN)[-1] == len(lines), run.said
    assert (hosts.folder / RUN / "logs/groups.log").read_text().count("was lost after step") >= 3
