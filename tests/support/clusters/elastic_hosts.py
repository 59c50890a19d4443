"""Elastic runs over hosts that lose each other, for the tests in ``cluster/``.

Each host has one group, which ``configs/clusters/elastic.sh`` launches, each by another launcher.
The groups of the first run have one rank each. The groups of the second run have two. Those of the
third run have two on two hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sdp
from sdp.tests.support.clusters.hosts import HEARTBEAT, PAUSE, SDP, Hosts, is_rank
from sdp.tests.support.processes import until, written_lines
from sdp.tests.support.small_runs import make_corpus

SECONDS = 300.0  # the limit for something that takes a few seconds on idle cores
CUT_SECONDS = 20.0
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


def _train(config: str, name: str) -> list[str]:
    return ["train", config, "--dump-dir", name]


def _torchrun(ranks: int, train: list[str]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "sdp", *train]


def _mpirun(hostfile: str, train: list[str]) -> list[str]:
    words = ["--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--launcher-args=--allow-run-as-root"]
    return [*SDP, "launch", *words, "--hostfile", hostfile, *train[1:]]


def _deepspeed(hostfile: str, train: list[str]) -> list[str]:
    return [*SDP, "launch", "--launcher", "deepspeed", "--hostfile", hostfile, *train[1:]]


_ONE = _train("elastic.json", "lost-groups")
ONE_RANK = Plan(
    "lost-groups",
    {"m": [*SDP, *_ONE], "n": _torchrun(1, _ONE), "o": _mpirun("only-o", _ONE), "p": _deepspeed("only-p", _ONE)},
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


def _two_ranks(engine: str) -> Plan:
    name = f"two-ranks-{list(ENGINES).index(engine)}"
    train = _train(f"{name}.json", name)
    return Plan(
        name,
        {"m": [*SDP, *train, "--nproc", "2"], "o": _mpirun("both-o", train), "p": _deepspeed("both-p", train)},
        f"{name}.json",
        ranks=2,
        # Six ranks import torch and DeepSpeed at the same time, on cores that others may use too.
        seconds=600.0,
    )


_WIDE = _train("two-hosts.json", "two-hosts")
PAIRS = {"m": "mn", "o": "op", "s": "st"}  # of hosts, by the one where the group's launch runs
TWO_HOSTS = Plan(
    "two-hosts",
    {"m": _deepspeed("pair-m", _WIDE), "o": _mpirun("pair-o", _WIDE), "s": _deepspeed("pair-s", _WIDE)},
    "two-hosts.json",
    ranks=2,
    seconds=600.0,
)


_FAR = _train("far.json", "far-coordinator")
FAR_COORDINATOR = Plan(
    "far-coordinator", {"m": [*SDP, *_FAR], "n": _torchrun(1, _FAR), "o": [*SDP, *_FAR]}, "far.json", coordinator="s"
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
        found = []
        for pid in self._hosts.processes(self.plan.name, host):
            with suppress(OSError):  # the process has just ended
                found += [pid] if is_rank(pid) else []
        return found

    def end_host(self, host: str) -> None:
        """Kill the group's launch and then all that it has started, so that nothing returns."""
        launch = self.groups.pop(host)
        launch.kill()
        launch.wait()
        for pid in self._hosts.processes(self.plan.name, host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def four_hosts_lose_each_other(hosts: Hosts) -> None:
    """The others go on after each loss, and take back what returns."""
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, ONE_RANK)
        run.steps(3, groups=4)
        _hostile_clients_delay_no_step(run)
        _a_host_loses_its_processes(run)
        _a_host_loses_its_link(hosts, run)
        _the_coordinator_is_killed(run)
        _a_group_is_told_to_stop_alone(run)
        _all_groups_are_told_to_stop(hosts, run, losses=3)


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
    assert run.groups["m"].wait(run.plan.seconds) == 128 + signal.SIGTERM
    run.steps(2, groups=3)
    run.groups["m"] = run.launch("m", run.plan.launches["m"], 0, "-again")
    run.steps(2, groups=4)


def _all_groups_are_told_to_stop(hosts: Hosts, run: LostGroups, losses: int) -> None:
    for process in run.groups.values():
        process.terminate()
    for process in run.groups.values():
        assert process.wait(run.plan.seconds) != 0
    assert run.coordinator.wait(run.plan.seconds) == 0, run.said
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert hosts.checkpoints(run.plan.name)[-1] == len(lines), run.said
    assert (hosts.folder / run.plan.name / "logs/groups.log").read_text().count("was lost after step") >= losses


def groups_of_two_ranks_lose_one(hosts: Hosts, engine: str) -> None:
    """The other rank of the group ends too, and ``elastic.sh`` launches both again.

    Then a launch on another host takes the number of a group whose processes are all dead.

    Args:
        hosts: the hosts.
        engine: one of ``ENGINES``, with ZeRO stage 3.
    """
    plan = _two_ranks(engine)
    _prepare_two_ranks(hosts, plan, ENGINES[engine])
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, plan)
        run.steps(3, groups=3)
        _a_rank_dies(run)
        _another_host_takes_over(run)
        _all_groups_are_told_to_stop(hosts, run, losses=2)


def the_coordinators_host_is_cut_off(hosts: Hosts) -> None:
    """All groups wait until its link is back. Then they go on as if it had been started again.

    No group is lost, and the coordinator is the same process.
    """
    config = json.loads((hosts.folder / "elastic.json").read_text())
    config["sdp"] |= {"groups": 3, "capacity": 0.75}
    (hosts.folder / FAR_COORDINATOR.config).write_text(json.dumps(config))
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, FAR_COORDINATOR)
        run.steps(3, groups=3)
        before = {host: run.ranks(host) for host in "mno"}
        hosts.plug("s", "down")
        try:
            time.sleep(CUT_SECONDS)
        finally:
            hosts.plug("s", "up")
        run.steps(3, groups=3)
        assert "no group is heard any longer" in run.said
        assert "was lost" not in run.said and {host: run.ranks(host) for host in "mno"} == before, run.said
        _all_groups_are_told_to_stop(hosts, run, losses=0)


def groups_on_two_hosts_lose_one(hosts: Hosts) -> None:
    """The rest of the group ends too, on the other host, and the group is launched again on both.

    A rank on the second host of a group dies. Then the second host of another group loses its link.
    """
    for pair in PAIRS.values():
        (hosts.folder / f"pair-{pair[0]}").write_text("".join(f"host-{host} slots=1\n" for host in pair))
    _prepare_two_ranks(hosts, TWO_HOSTS, ENGINES["deepspeed"])
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, TWO_HOSTS)
        run.steps(3, groups=3)
        _the_second_host_loses_its_rank(run)
        _the_second_host_loses_its_link(hosts, run)
        _all_groups_are_told_to_stop(hosts, run, losses=2)


def _the_second_host_loses_its_rank(run: LostGroups) -> None:
    (rank,), (other,) = run.ranks("p"), run.ranks("o")
    os.kill(rank, signal.SIGKILL)
    run.until(lambda: "group 1 on host-p was lost after step" in run.said)
    run.until(lambda: other not in run.ranks("o"))
    assert any(line["groups"] == 2 for line in run.steps(1, groups=3)), run.said
    assert len(run.ranks("o")) == len(run.ranks("p")) == 1


def _the_second_host_loses_its_link(hosts: Hosts, run: LostGroups) -> None:
    (cut,), (other,) = run.ranks("n"), run.ranks("m")
    hosts.plug("n", "down")
    try:
        began = time.monotonic()
        run.until(lambda: "group 0 on host-n was lost after step" in run.said)
        run.steps(2, groups=2)
        run.until(lambda: other not in run.ranks("m"))
        time.sleep(max(0.0, CUT_SECONDS - (time.monotonic() - began)))
    finally:
        hosts.plug("n", "up")
    run.steps(2, groups=3)
    run.until(lambda: cut not in run.ranks("n"))  # it has learnt that it was cut off
    assert len(run.ranks("m")) == len(run.ranks("n")) == 1


def _prepare_two_ranks(hosts: Hosts, plan: Plan, settings: Mapping[str, Any]) -> None:
    for host in "op":
        (hosts.folder / f"both-{host}").write_text(f"host-{host} slots=2\n")
    config = json.loads((hosts.folder / "elastic.json").read_text())
    elastic = {"enabled": True, "heartbeat_seconds": 30, "wait_seconds": 600}
    config["sdp"] |= {"groups": 3, "capacity": 0.75, "elastic": elastic}
    config["training"] |= {"start_timeout": 600, "step_timeout": 300, "save_timeout": 120}
    for section, values in settings.items():
        config[section] = config.get(section, {}) | values
    if config["data"]["path"] == "even-shards":  # two ranks share the 280 rows of the embedding
        (hosts.folder / "even").mkdir()
        make_corpus(hosts.folder / "even", vocab_size=280).rename(hosts.folder / "even-shards")
    (hosts.folder / plan.config).write_text(json.dumps(config))


def _a_rank_dies(run: LostGroups) -> None:
    """Kill rank 1 of the group under DeepSpeed's launcher. Rank 0 must end too."""
    before = run.ranks("p")
    assert len(before) == 2
    (rank_1,) = (pid for pid in before if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(rank_1, signal.SIGKILL)
    run.until(lambda: "group 2 on host-p was lost after step" in run.said)
    run.until(lambda: not set(before) & set(run.ranks("p")))
    assert any(line["groups"] == 2 for line in run.steps(1, groups=3)), run.said
    assert "elastic.sh: group 2: ended with exit code" in run.said
    run.until(lambda: "group 2 on host-p joined after step" in run.said)
    assert len(run.ranks("p")) == 2


def _another_host_takes_over(run: LostGroups) -> None:
    run.end_host("o")
    run.until(lambda: "group 1 on host-o was lost after step" in run.said)
    run.steps(2, groups=2)
    host = "n"
    run.groups[host] = run.launch(host, _torchrun(2, _train(run.plan.config, run.plan.name)), 1)
    run.steps(2, groups=3)
    run.until(lambda: f"group 1 on host-{host} joined after step" in run.said)
    assert len(run.ranks(host)) == 2 and not run.ranks("o")
