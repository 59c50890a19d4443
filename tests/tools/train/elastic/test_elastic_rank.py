"""A rank of an elastic run: what it refuses before it waits for anybody, and where it listens."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.elastic.coordination.addresses import address_towards
from sdp.engine.elastic.coordination.assembly import Identity
from sdp.engine.environment.elastic import hidden_loopback
from sdp.engine.errors import LaunchError, PeerLostError
from sdp.tests.support.clusters.elastic_runs import elastic_config
from sdp.tools.train import elastic_rank
from sdp.tools.train.elastic_rank import run
from sdp.tools.train.options import TrainOptions


def start(folder: Path, corpus: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(elastic_config(corpus, steps=20, groups=4)))
    run(TrainOptions(config=path, overrides=(), dump_dir=folder / "run"), print)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a rank that is the only one of its group."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "SDP_ELASTIC_COORDINATOR": "127.0.0.1:1", "SDP_ELASTIC_TOKEN": "x" * 16,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("slot", [4, 9_999_999])
def test_a_group_that_the_run_does_not_have_is_one_line(
    told: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, slot: int
) -> None:
    told.setenv("SDP_ELASTIC_GROUP", str(slot))
    with pytest.raises(LaunchError, match=rf"SDP_ELASTIC_GROUP={slot}: the run has 4 groups, numbered from 0"):
        start(tmp_path, corpus)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["RANK", "SDP_ELASTIC_GROUP"])
def test_a_rank_whose_launcher_is_unknown_is_one_line(
    told: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, missing: str
) -> None:
    told.setenv("SDP_ELASTIC_GROUP", "0")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if missing == "RANK" else (missing,):
        told.delenv(name)
    with pytest.raises(LaunchError, match=r"needs RANK and WORLD_SIZE|start the run with sdp train|is not set"):
        start(tmp_path, corpus)


@pytest.mark.parametrize(("chosen", "listen"), [(None, "127.0.0.1"), ("lo", None)])
def test_gloo_between_groups_listens_towards_the_coordinator_unless_the_user_chose_an_interface(
    told: pytest.MonkeyPatch, tmp_path: Path, corpus: Path, chosen: str | None, listen: str | None
) -> None:
    """The ranks of a group on one host get the loopback interface when they join each other. Groups
    on other hosts could not reach it.
    """

    @contextlib.contextmanager
    def joins(*_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        yield SimpleNamespace(at=lambda *_: None)

    def find(_: Any, who: Identity, *more: Any) -> None:
        found.append(who)
        raise KeyboardInterrupt  # this test has seen enough

    found: list[Identity] = []
    told.setenv("SDP_ELASTIC_GROUP", "0")
    told.setenv("GLOO_SOCKET_IFNAME", chosen or "to be restored")
    if chosen is None:
        os.environ.pop("GLOO_SOCKET_IFNAME")
    for name, value in {
        "started": joins,
        "world": SimpleNamespace(enter=lambda _: None),
        "build": lambda *_: (None, None, 0),
        "serve_meeting_store": lambda _: (None, "127.0.0.1:1"),
        "share_inside": lambda value: value,
        "_find_coordinator": find,
    }.items():
        told.setattr(elastic_rank, name, value)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, corpus)
    assert [who.listen for who in found] == [listen]


@pytest.mark.parametrize(
    ("host", "address", "is_hidden"),
    [
        ("host-a", "127.0.1.1", True),
        ("127.0.1.1", "127.0.1.1", False),
        ("localhost", "127.0.0.1", False),
        ("host-a", "10.0.0.1", False),
    ],
)
def test_a_name_that_is_a_loopback_address_here_is_warned_of(host: str, address: str, is_hidden: bool) -> None:
    assert (hidden_loopback(host, address) is not None) == is_hidden


def test_a_coordinator_that_no_way_leads_to_is_one_line() -> None:
    with pytest.raises(LaunchError, match=r"its host nowhere\.\.invalid cannot be reached"):
        address_towards("nowhere..invalid")
    with pytest.raises(PeerLostError, match=r"cannot be reached for 0.1 s \(.*\); look whether this host's link is"):
        address_towards("nowhere..invalid", seconds=0.1)
    assert address_towards("127.0.0.1") == "127.0.0.1"
