"""Values that no rank sends, under the right token, and what a launcher may tell a rank wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.membership import Membership
from sdp.engine.elastic.coordination.messages import MOST_ANSWER_BYTES, Channel, ProtocolError
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.environment.elastic import elastic_environment, read_token
from sdp.engine.errors import LaunchError

JOIN: dict[str, Any] = {
    "type": "join", "slot": 0, "inside": 0, "ranks": 1, "life": "first", "host": "here", "store": "127.0.0.1:1000",
    "step": 0, "phase": STEP, "fresh": True, "pending": False, "generation": 0, "members": [],
}  # fmt: skip


def membership(groups: int = 2, ranks: int = 1) -> Membership:
    return Membership(groups, ranks, send=lambda *_: None, close=lambda *_: None, say=lambda *_: None)


WRONG: list[tuple[str, Any]] = [
    *(("slot", value) for value in (2, -1, 0.0, True, "0", None, 10**30)),
    *(("inside", value) for value in (1, -1, None)),
    *(("step", value) for value in (-1, 2**53, "0", None, [])),
    *(("phase", value) for value in (-1, None, {})),
    *(("generation", value) for value in ("1", [], None, -1, 10**30)),
    *(("fresh", value) for value in (1, "yes", [])),
    *(("pending", value) for value in (1, "yes", {})),
    *(("life", value) for value in (None, 3, "x" * 257)),
    *(("host", value) for value in (None, [], "x" * 257)),
    *(("store", value) for value in (None, "nowhere", "here:70000", ":1", "a b:1", "here:²", "here:-1")),
    ("ranks", 2),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_join_with_a_wrong_value_ends_its_connection_alone(key: str, value: Any) -> None:
    coordinator = membership()
    with pytest.raises(ProtocolError):
        coordinator.hear("peer", JOIN | {key: value})
    for slot in (0, 1):
        coordinator.hear(slot, JOIN | {"slot": slot, "life": str(slot)})
    assert coordinator.living == [0, 1]


@pytest.mark.parametrize("message", [{"type": "vote"}, {"type": "bye"}, {"type": "beat"}, {"type": "\x1b[2J"}], ids=str)
def test_nothing_comes_before_a_join(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="before a join") as caught:
        membership().hear("peer", message)
    assert "\x1b" not in str(caught.value)


def test_an_unknown_message_and_facts_without_end_are_refused() -> None:
    """The answer to a vote has the facts of all ranks, and must fit into a message."""
    coordinator = membership(groups=200)
    for slot in range(200):
        coordinator.hear(slot, JOIN | {"slot": slot, "life": str(slot)})
    vote = {"type": "vote", "generation": 1, "attempt": 0, "ok": True}
    with pytest.raises(ProtocolError, match="facts of 50,002 bytes"):
        coordinator.hear(0, vote | {"facts": "x" * 50_000})
    assert MOST_ANSWER_BYTES > 200 * 10_002
    for slot in range(200):
        coordinator.hear(slot, vote | {"facts": "x" * 10_000})
    assert coordinator.step == 1
    with pytest.raises(ProtocolError, match="an unknown message 'dance'"):
        coordinator.hear(0, {"type": "dance"})


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"type": 3}', "{}", "[" * 1000, "nonsense", '{"type": "\\ud800"}', "9" * 900]
)
def test_json_that_is_no_message_ends_the_connection(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = Channel(b"x" * 16, is_server=True), Channel(b"x" * 16, is_server=False)
    client.feed(server.greeting)
    server.feed(client.greeting)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: text)
    with pytest.raises(ProtocolError, match=r"not JSON|without a type"):
        server.feed(client.seal({}))


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 300, "a..b", "::ffff:192.0.2.1", "ö" * 300, "ö..b", "\udcff"])
def test_an_address_that_cannot_be_listened_on_is_one_line(host: str) -> None:
    with pytest.raises(LaunchError, match=r"the coordinator cannot listen on .*; name another address") as caught:
        Coordinator(1, 1, b"x" * 16, print, host=host)
    assert len(str(caught.value)) < 450 and "\udcff" not in str(caught.value)


@pytest.mark.parametrize("port", [-1, 1 << 16, 10**30])
def test_a_port_that_is_none_is_one_line(port: int) -> None:
    with pytest.raises(LaunchError, match=r"the coordinator cannot listen on 127\.0\.0\.1:.*; name another address"):
        Coordinator(1, 1, b"x" * 16, print, port=port)


@pytest.mark.parametrize("slot", ["²", "-1", "x", "", "9" * 5000])
@pytest.mark.parametrize("address", ["127.0.0.1:1"])
def test_a_group_number_that_is_none_is_one_line(slot: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, slot, address)


@pytest.mark.parametrize(
    "address", ["here", "here:", ":1", "here:70000", "here:²", "here:-1", "a b:1", "here:" + "9" * 5000]
)
def test_an_address_of_a_coordinator_that_is_none_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, "0", address)


def _told(monkeypatch: pytest.MonkeyPatch, slot: str, address: str) -> None:
    monkeypatch.setenv("SDP_ELASTIC_GROUP", slot)
    monkeypatch.setenv("SDP_ELASTIC_COORDINATOR", address)
    monkeypatch.setenv("SDP_ELASTIC_TOKEN", "x" * 16)
    with pytest.raises(LaunchError, match="a number and HOST:PORT are expected") as caught:
        elastic_environment()
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "missing", "binary", "huge", "short", "name"])
def test_a_file_that_has_no_token_is_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"binary": b"\xff" * 40, "huge": b"x" * 100_000}.get(kind, b"short"))
    shown = {"zero": "/dev/zero", "name": "x" * 5000}.get(kind, str(path))
    monkeypatch.setenv("SDP_ELASTIC_TOKEN_FILE", shown)
    with pytest.raises(LaunchError, match=r"cannot be read|needs a shared token") as caught:
        read_token()
    assert len(str(caught.value)) < 6000 and "\n" not in str(caught.value)
