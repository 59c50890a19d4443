"""Elastic runs over hosts with a launch for each group, for the tests in ``cluster/``.

Each host has one group, which ``configs/clusters/elastic.sh`` launches, each by another launcher.
The groups of the first run have one rank each. The groups of the second run have two. Those of the
third run have two on two hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sdp
from sdp.tests.support.clusters.hosts import PAUSE, SDP, Hosts
from sdp.tests.support.processes import until, written_lines

SECONDS = 300.0  # the limit for something that takes a few seconds on idle cores
SCRIPT = str(Path(sdp.__path__[0]) / "configs/clusters/elastic.sh")
PORT = 29400
ADDRESSES = {"m": "10.77.0.13", "s": "10.77.0.19"}  # of hosts with a coordinator


@dataclass(frozen=True)
class Plan:
    """An elastic run with a launch for each group.

    Attributes:
        name: the dump directory, which is also a part of the names of all logs.
        launches: by the letter of the host, the words that launch its group. The groups are
            numbered in this order.
        config: the run's configuration, a file in the hosts' folder.
        ranks: ranks of each group.
        coordinator: the letter of the host with the coordinator.
        seconds: the limit for something that takes a few seconds on idle cores.
    """

    name: str
    launches: Mapping[str, list[str]]
    config: str = "elastic.json"
    ranks: int = 1
    coordinator: str = "m"
    seconds: float = SECONDS


def train(config: str, name: str) -> list[str]:
    """Return the words of a command that trains."""
    return ["train", config, "--dump-dir", name]


def torchrun(ranks: int, train_words: list[str]) -> list[str]:
    """Return the words that launch a group with torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "sdp", *train_words]


def _mpirun(hostfile: str, train_words: list[str]) -> list[str]:
    words = ["--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root"]
    return [*SDP, "launch", *words, "--hostfile", hostfile, *train_words[1:]]


def _deepspeed(hostfile: str, train_words: list[str]) -> list[str]:
    return [*SDP, "launch", "--launcher", "deepspeed", "--hostfile", hostfile, *train_words[1:]]


_ONE = train("elastic.json", "lost-groups")
ONE_RANK = Plan(
    "lost-groups",
    {"m": [*SDP, *_ONE], "n": torchrun(1, _ONE), "o": _mpirun("only-o", _ONE), "p": _deepspeed("only-p", _ONE)},
)
# Settings of runs whose groups have two ranks. The weights are cut by ZeRO stage 3, and in the last
# case also by tensor parallelism.
ENGINES: dict[str, dict[str, Any]] = {
    "deepspeed": {"sdp": {"engine": "deepspeed"}},
    "fsdp2": {},
    "fsdp2, tensor parallelism, neurons": {
        "sdp": {"granularity": "neuron", "neuron_groups": 4},
        "model": {"num_attention_heads": 8},
        "data": {"path": "even-shards"},
        "tensor_parallel": {"autotp_size": 2},
    },
}


def two_ranks(engine: str) -> Plan:
    """Return the run whose groups have two ranks on one host, with one of ``ENGINES``."""
    name = f"two-ranks-{list(ENGINES).index(engine)}"
    words = train(f"{name}.json", name)
    return Plan(
        name,
        {"m": [*SDP, *words, "--nproc", "2"], "o": _mpirun("both-o", words), "p": _deepspeed("both-p", words)},
        f"{name}.json",
        ranks=2,
        # Six ranks import torch and DeepSpeed at the same time, on cores that others may use too.
        seconds=600.0,
    )


_WIDE = train("two-hosts.json", "two-hosts")
PAIRS = {"m": "mn", "o": "op", "s": "st"}  # of hosts, by the one where the group's launch runs
TWO_HOSTS = Plan(
    "two-hosts",
    {"m": _deepspeed("pair-m", _WIDE), "o": _mpirun("pair-o", _WIDE), "s": _deepspeed("pair-s", _WIDE)},
    "two-hosts.json",
    ranks=2,
    seconds=600.0,
)


_FAR = train("far.json", "far-coordinator")
FAR_COORDINATOR = Plan(
    "far-coordinator", {"m": [*SDP, *_FAR], "n": torchrun(1, _FAR), "o": [*SDP, *_FAR]}, "far.json", coordinator="s"
)


class LostGroups:
    """The run: the groups on their hosts, and the coordinator on host-m."""

    def __init__(self, hosts: Hosts, stack: ExitStack, plan: Plan):
        self._hosts, self._stack, self.plan = hosts, stack, plan
        self.address = f"{ADDRESSES[plan.coordinator]}:{PORT}"  # of the coordinator
        (hosts.folder / "token").write_text("a secret that the groups share")
        self.groups = {
            host: self.launch(host, words, group) for group, (host, words) in enumerate(plan.launches.items())
        }
        self._coordinators = 0
        self.coordinate()

    def launch(self, host: str, words: list[str], group: int, again: str = "") -> subprocess.Popen[str]:
        """Start ``elastic.sh`` for a group; ``again`` is a part of the log's name."""
        return self.start(host, SCRIPT, *words, log=f"{self.plan.name}-{host}{again}.log", group=group)

    def start(self, host: str, *words: str, log: str, group: int | None = None) -> subprocess.Popen[str]:
        told = [f"SDP_ELASTIC_COORDINATOR={self.address}", f"SDP_ELASTIC_TOKEN_FILE={self._hosts.folder}/token"]
        told += [f"SDP_ELASTIC_GROUP={group}"] if group is not None else []
        process = self._hosts.start("env", *told, *words, log=log, host=host)
        self._stack.callback(process.kill)
        return process

    def coordinate(self) -> None:
        """Start the coordinator, at the same address each time."""
        self._coordinators += 1
        plan = self.plan
        words = ["coordinate", plan.config, "--bind", self.address, "--dump-dir", plan.name]
        words += ["--ranks", str(plan.ranks)]
        self.coordinator = self.start(
            plan.coordinator, *SDP, *words, log=f"{plan.name}-coordinator-{self._coordinators}.log"
        )

    def harm(self) -> subprocess.Popen[str]:
        """Let twenty hostile clients on another host begin."""
        words = [sys.executable, "-P", "-m", "sdp.tests.support.clusters.hostile", *self.address.split(":"), "token"]
        process = self.start("p", *words, log="hostile.log")
        self.until(lambda: "they are here" in (self._hosts.folder / "hostile.log").read_text())
        return process

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._hosts.folder.glob(f"{self.plan.name}-*.log")))

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return written_lines(self._hosts.folder / self.plan.name / "metrics.jsonl")

    def until(self, condition: Callable[[], Any]) -> Any:
        try:
            return until(condition, self.plan.seconds, PAUSE)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run says:\n{self.said}") from None

    def steps(self, count: int, groups: int) -> list[dict[str, Any]]:
        """Wait for ``count`` more steps, the last one with so many groups; return all lines."""
        goal = len(self.lines()) + count
        return self.until(
            lambda: lines if len(lines := self.lines()) >= goal and lines[-1]["groups"] == groups else None
        )

    def ranks(self, host: str) -> list[int]:
        return self._hosts.ranks(self.plan.name, host)

    def end_host(self, host: str) -> None:
        """Kill the group's launch and then all that it has started, so that nothing returns."""
        launch = self.groups.pop(host)
        launch.kill()
        launch.wait()
        for pid in self._hosts.processes(self.plan.name, host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
