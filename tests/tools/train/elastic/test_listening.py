"""An elastic run on one host listens on loopback addresses only, and a group returns to it while
hostile clients attack its coordinator.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sdp.engine.elastic.abort import Abort, WaitLimits
from sdp.engine.elastic.coordination.addresses import serve_meeting_store
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.process_groups import Meeting
from sdp.tests.support.clusters.elastic_runs import ElasticRun, elastic_config
from sdp.tests.support.clusters.hostile import attacked
from sdp.tests.support.network.sockets import listening_sockets
from sdp.tests.support.processes import until
from sdp.tools import coordinate
from sdp.tools.cli import main

GROUPS = 2
DRAWN = "a secret that a test knows"


def draw(secret: str) -> None:
    """Let the launcher draw this token, so that the hostile clients can record an honest client."""
    draws = secrets.token_hex
    secrets.token_hex = lambda size=None: secret if size == 32 else draws(size)


@pytest.fixture
def run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticRun]:
    """A run of two groups that have met."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    settings = elastic_config(corpus, groups=GROUPS)
    settings["sdp"]["capacity"] = 1.0
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    made = ElasticRun(config, tmp_path / "run", "--nproc", str(GROUPS), prepare=partial(draw, DRAWN))
    try:
        made.wait_for(2, groups=GROUPS)
        yield made
    finally:
        made.kill()


def own_sockets() -> dict[str, set[int]]:
    """Return the addresses at which this process listens, each with its ports."""
    found: dict[str, set[int]] = {}
    for each in listening_sockets(os.getpid())[os.getpid()]:
        found.setdefault(each.host, set()).add(each.port)
    return found


def test_a_run_on_one_host_listens_on_loopback_and_takes_a_group_back_during_an_attack(
    run: ElasticRun, tmp_path: Path
) -> None:
    """The coordinator is in the launcher. The store and gloo are in the ranks."""
    port = assert_only_loopback(run)
    (tmp_path / "token").write_text(DRAWN)
    with attacked("127.0.0.1", port, tmp_path / "token") as attack:
        before = attack.count()
        run.lose(1, of=GROUPS)
        until(lambda: not attack.idle_kinds(before), pause=0.1)
        assert_only_loopback(run)  # of the new generation, too
    assert run.said.count("was lost") == 1, run.said
    assert run.stop() == 143, run.said


def assert_only_loopback(run: ElasticRun) -> int:
    """Look at all processes of the run, and return the coordinator's port."""
    ranks = {group: pids[0] for group, pids in run.ranks().items()}
    assert sorted(ranks) == [*range(GROUPS)]
    found = listening_sockets(run.process.pid, *ranks.values())
    (coordinator,) = found[run.process.pid]
    for pid in ranks.values():
        # the store in which groups meet, gloo inside the group, and gloo between groups
        assert len({each.port for each in found[pid]}) >= 3, found
    assert {each.host for sockets in found.values() for each in sockets} == {"127.0.0.1"}, found
    return coordinator.port


@pytest.mark.parametrize("chosen", [None, "lo"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_the_meeting_store_and_gloo_listen_where_they_are_told(
    host: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain store of torch's listens on all interfaces, so the meeting store gets a socket. Gloo
    listens at the first address of GLOO_SOCKET_IFNAME, if there is one.
    """
    gloo, listen = (host, host) if chosen is None else ("127.0.0.1", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen or "an interface that does not exist")
    before = own_sockets()
    plain = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    assert any(plain.port in own_sockets().get(every, ()) for every in ("::", "0.0.0.0"))
    del plain
    store, address = serve_meeting_store(host)
    assert _new(before) == {host: {int(address.rpartition(":")[2])}}
    before = own_sockets()

    def meet(rank: int) -> Meeting:
        abort = Abort(lambda: False, lambda _: None)
        meeting = Meeting(
            address, "a generation", rank, rank, abort, WaitLimits(20.0, lambda _: False, 20.0), listen=listen
        )
        meeting.make_group("world", [0, 1])
        return meeting

    with ThreadPoolExecutor(2) as threads:
        meetings = list(threads.map(meet, range(2), timeout=60))
    found = _new(before)
    assert {each: len(ports) for each, ports in found.items()} == {gloo: 2}  # one of each rank
    for meeting in meetings:
        meeting.leave()
    del store


def _new(before: dict[str, set[int]]) -> dict[str, set[int]]:
    new = {host: ports - before.get(host, set()) for host, ports in own_sockets().items()}
    return {host: ports for host, ports in new.items() if ports}


def test_a_coordinator_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    before = own_sockets()
    coordinator = Coordinator(1, 1, b"x" * 16, print)
    found = _new(before)
    coordinator.start()
    coordinator.stop()
    assert found == {"127.0.0.1": {coordinator.port}}


@pytest.mark.parametrize(("words", "host"), [((), "127.0.0.1"), (("--bind", "127.0.0.2:29400"), "127.0.0.2")])
def test_the_command_listens_on_loopback_unless_bind_names_another_address(
    words: tuple[str, ...], host: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtAnyPort(Coordinator):
        """Takes a free port, because the default one may be in use."""

        def __init__(self, *args: Any, port: int, **settings: Any):
            super().__init__(*args, port=0, **settings)
            told.append(port)
            found.append(_new(before))
            ports.append(self.port)

        def start(self) -> None:
            raise KeyboardInterrupt  # this test has seen enough

    config = tmp_path / "config.json"
    config.write_text(json.dumps(elastic_config(corpus, groups=GROUPS)))
    monkeypatch.setenv("SDP_ELASTIC_TOKEN", "x" * 16)
    monkeypatch.setattr(coordinate, "Coordinator", AtAnyPort)
    before, told, ports, found = own_sockets(), [], [], []
    assert main(["coordinate", str(config), *words]) == 130
    assert told == [29400]
    assert found == [{host: set(ports)}]
