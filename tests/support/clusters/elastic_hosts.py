"""What happens to elastic runs over hosts that lose each other, for the tests in ``cluster/``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sdp.tests.support.clusters.elastic_launches import (
    ENGINES,
    FAR_COORDINATOR,
    ONE_RANK,
    PAIRS,
    TWO_HOSTS,
    LostGroups,
    Plan,
    torchrun,
    train,
    two_ranks,
)
from sdp.tests.support.clusters.hosts import HEARTBEAT, Hosts
from sdp.tests.support.network.sockets import listening_sockets
from sdp.tests.support.small_runs import make_corpus

CUT_SECONDS = 20.0


def four_hosts_lose_each_other(hosts: Hosts) -> None:
    """The others go on after each loss, and take back what returns."""
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, ONE_RANK)
        run.steps(3, groups=4)
        _all_listen_where_they_are_told(hosts, run)
        _hostile_clients_delay_no_step(run)
        _a_host_loses_its_processes(run)
        _a_host_loses_its_link(hosts, run)
        for host in "nop":
            _a_rank_is_stopped_and_wakes_up(run, host)
        _a_group_is_launched_while_its_link_is_down(hosts, run)
        _the_coordinator_is_killed(run)
        _a_group_is_told_to_stop_alone(run)
        _all_groups_are_told_to_stop(hosts, run, losses=7)


def _all_listen_where_they_are_told(hosts: Hosts, run: LostGroups) -> None:
    """Between groups, ranks listen at the address that leads to the coordinator."""
    for host in run.plan.launches:
        sockets = listening_sockets(*run.ranks(host))  # of the local launcher, too
        found = {each.host for of_process in sockets.values() for each in of_process}
        assert hosts.address(host) in found, (host, found)
        assert found <= {hosts.address(host), "127.0.0.1"}, (host, found)
    (coordinator,) = listening_sockets(run.coordinator.pid)[run.coordinator.pid]
    assert f"{coordinator.host}:{coordinator.port}" == run.address


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


def _a_rank_is_stopped_and_wakes_up(run: LostGroups, host: str) -> None:
    """It learns that its group was cut off, and ends. Then its launcher ends, and is started
    again.
    """
    (rank,) = run.ranks(host)
    lost = f"group {list(run.plan.launches).index(host)} on host-{host} was lost after step"
    before = run.said.count(lost)
    os.kill(rank, signal.SIGSTOP)
    try:
        run.until(lambda: run.said.count(lost) > before)
        run.steps(2, groups=3)
    finally:
        os.kill(rank, signal.SIGCONT)
    run.steps(2, groups=4)
    assert len(run.ranks(host)) == 1 and rank not in run.ranks(host)


def _a_group_is_launched_while_its_link_is_down(hosts: Hosts, run: LostGroups) -> None:
    """As when its host has started again before the network. The group waits for the link."""
    (rank,) = run.ranks("n")
    lost = run.said.count("group 1 on host-n was lost after step")
    log = hosts.folder / run.plan.name / "logs" / "rank-1.log"
    hosts.plug("n", "down")
    try:
        os.kill(rank, signal.SIGKILL)
        run.until(lambda: run.said.count("group 1 on host-n was lost after step") > lost)
        run.until(lambda: f"its host {hosts.address('m')} cannot be reached" in log.read_text())
        waiting = run.ranks("n")
        run.steps(2, groups=3)
    finally:
        hosts.plug("n", "up")
    run.steps(2, groups=4)
    assert run.ranks("n") == waiting, run.said


def _the_coordinator_is_killed(run: LostGroups) -> None:
    """No group is lost, however long it is away, up to ``wait_seconds``."""
    before = run.lines()[-1]["generation"]
    lost, ranks = run.said.count("was lost"), {host: run.ranks(host) for host in run.plan.launches}
    run.coordinator.send_signal(signal.SIGKILL)
    run.coordinator.wait()
    time.sleep(HEARTBEAT + 2)
    run.coordinate()
    assert {line["generation"] - before for line in run.steps(3, groups=4)[-3:]} <= {1, 2}, run.said
    assert run.said.count("was lost") == lost, run.said
    assert {host: run.ranks(host) for host in run.plan.launches} == ranks


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
    plan = two_ranks(engine)
    _prepare_two_ranks(hosts, plan, ENGINES[engine])
    with ExitStack() as stack:
        run = LostGroups(hosts, stack, plan)
        run.steps(3, groups=3)
        _a_rank_dies(run)
        if engine == "fsdp2":
            for host in "op":
                _a_rank_is_stopped_for_good(run, host)
        _another_host_takes_over(run)
        _all_groups_are_told_to_stop(hosts, run, losses=4 if engine == "fsdp2" else 2)


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


def _a_rank_is_stopped_for_good(run: LostGroups, host: str) -> None:
    """The other rank of its group ends. Then the launcher kills the stopped one, and is started
    again.
    """
    before = run.ranks(host)
    lost = f"group {list(run.plan.launches).index(host)} on host-{host} was lost after step"
    count = run.said.count(lost)
    os.kill(before[0], signal.SIGSTOP)
    run.until(lambda: run.said.count(lost) > count)
    run.steps(2, groups=3)
    assert len(run.ranks(host)) == 2 and not set(before) & set(run.ranks(host))


def _another_host_takes_over(run: LostGroups) -> None:
    run.end_host("o")
    run.until(lambda: "group 1 on host-o was lost after step" in run.said)
    run.steps(2, groups=2)
    host = "n"
    run.groups[host] = run.launch(host, torchrun(2, train(run.plan.config, run.plan.name)), 1)
    run.steps(2, groups=3)
    run.until(lambda: f"group 1 on host-{host} joined after step" in run.said)
    assert len(run.ranks(host)) == 2 and not run.ranks("o")
