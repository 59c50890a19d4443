"""The service and its clients over HTTP: signatures, limits, and a service that starts again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from sdp.engine.errors import ConfigError, ServiceError
from sdp.engine.service.anchors import Slice
from sdp.engine.service.client import Client
from sdp.engine.service.wire import DIGEST, MOST_BYTES, SIGNATURE, TIME, Signer, pack, unpack
from sdp.tests.engine.service.test_equality import TOKEN, served
from sdp.tests.support.cases import Case
from sdp.tools.train.service import encryption

CASE = Case(2, 1, steps=4, sync='{"every": 2}')


@contextlib.contextmanager
def connection(address: str, token: bytes = TOKEN, wait_seconds: float = 30.0, tls: Any = None) -> Any:
    client = Client(address, token, wait_seconds, tls)
    try:
        yield client
    finally:
        client.close()


def raw(address: str, content: bytes, seconds: float = 5.0) -> bytes:
    """Send bytes to the service, and return its answer, or what came until it closed."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), seconds) as stream:
        stream.sendall(content)
        with contextlib.suppress(TimeoutError, ConnectionError):
            return stream.recv(1 << 16)
    return b""


def post(address: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    async def work() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{address}/{path}", data=body, headers=headers) as response,
        ):
            return response.status, json.loads(await response.read())

    return asyncio.run(work())


def test_only_signed_recent_requests_are_answered_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(CASE) as (run, address, _), connection(address) as client:
        client.join(None, {})
        body = json.dumps({"session": client.session}).encode()
        headers = Signer(TOKEN).headers("heartbeat", body, time.time())
        assert post(address, "heartbeat", body, headers)[0] == 200
        refused = [
            ("heartbeat", body, headers),  # a copy
            ("leave", body, Signer(TOKEN).headers("heartbeat", body, time.time())),  # of another request
            ("heartbeat", body, Signer(b"another token of a test").headers("heartbeat", body, time.time())),
            ("heartbeat", body, Signer(TOKEN).headers("heartbeat", body, time.time() - 1000)),
            ("heartbeat", body, Signer(TOKEN).headers("heartbeat", body, time.time()) | {TIME: "nan"}),
            ("heartbeat", body, Signer(TOKEN).headers("heartbeat", body, time.time()) | {SIGNATURE: "ä"}),
            ("heartbeat", body, {}),
        ]
        for path, content, given in refused:
            assert post(address, path, content, given)[0] == 401, given
        status, answer = post(address, "heartbeat", b"{}", Signer(TOKEN).headers("heartbeat", body, time.time()))
        assert (status, DIGEST in answer["error"]) == (400, True)
        assert len(run.members) == 1
        with connection(address, b"another token", 2.0) as other, pytest.raises(ServiceError, match="another token"):
            other.join(None, {})
        monkeypatch.setattr("sdp.engine.service.client._ANSWER_BYTES", 9)
        with pytest.raises(ServiceError, match="has more than 9 bytes"):
            client.request("heartbeat")


@pytest.mark.parametrize(
    ("action", "body", "message"),
    [
        ("lease", {"number": "x"}, "lease"),
        ("lease", {}, "number"),
        ("anchors", {"slices": [["stem.weight", [0, 0], [10**9, 10**9]]]}, "at most"),
        ("anchors", {"slices": [["stem.weight", [0, 0], [-1, 4]]]}, "not in the model"),
        ("anchors", {"slices": [["../secret", [0], [1]]]}, "not in the model"),
        ("anchors", {"slices": [[1, 2]]}, "anchors"),
        ("deliver", {"average": 1}, "facts"),
        ("nothing", {}, "no such request"),
    ],
)
def test_a_wrong_request_of_a_member_is_one_line(action: str, body: dict[str, Any], message: str) -> None:
    with served(CASE) as (_, address, _), connection(address) as client:
        client.join(None, {})
        client.request("begin", micro_batches=1, width=2, data_ranks=1, data="")
        with pytest.raises(ServiceError, match=message):
            client.request(action, **body)
        assert client.request("heartbeat")["closed"] == 0


def test_weights_of_an_evaluation_are_not_those_of_the_next_round() -> None:
    with served(CASE) as (run, address, _), connection(address) as client:
        client.join(None, {})
        assert [client.request("claim", step=2)["mine"] for _ in range(2)] == [True, True]  # an answer may be lost
        run.anchors.weights["stem.weight"] += 1
        for average, moved in ((0, 1.0), (1, 0.0)):  # the second one waits for a round, so nobody evaluates
            client.request("heartbeat", average=average)
            weight = torch.zeros(run.anchors.weights["stem.weight"].shape)
            client.fetch([(Slice("stem.weight", (0, 0), tuple(weight.shape)), weight)])
            torch.testing.assert_close(run.anchors.weights["stem.weight"] - weight, torch.full_like(weight, moved))


def test_slices_that_are_not_safetensors_are_refused() -> None:
    tensor = Slice("stem.weight", (0, 0), (2, 2)), torch.ones(2, 2)
    good = pack([(*tensor, "none")])
    assert torch.equal(unpack(good)[tensor[0]], tensor[1])
    assert torch.allclose(unpack(pack([(*tensor, "int8")]))[tensor[0]], tensor[1])
    metadata = good.replace(b"stem.weight", b"stem.weighx").replace(b"[2, 2]", b"[4, 4]", 1)
    for bad in (b"", b"\xff" * 100, good[:-3], good + b"x", (1 << 62).to_bytes(8, "little"), metadata):
        with pytest.raises(ServiceError, match="consist of slices"):
            unpack(bad)


def test_tls_encrypts_for_groups_that_trust_the_certificate(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=service"]
        files = ["-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"]
        subprocess.run(
            ["openssl", *words, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True
        )
    with served(CASE, tls=encryption(tmp_path / "mine.pem", tmp_path / "mine.key", serves=True)) as (run, address, _):
        with connection(address, tls=encryption(tmp_path / "mine.pem", serves=False)) as client:
            assert client.join(None, {}) == 0
            anchor = torch.zeros(run.anchors.weights["stem.weight"].shape)
            client.fetch([(Slice("stem.weight", (0, 0), tuple(anchor.shape)), anchor)])
            assert torch.equal(anchor, run.anchors.weights["stem.weight"])
        why = "no encrypted connection .*--tls-ca"
        other = encryption(tmp_path / "other.pem", serves=False)
        with connection(address, tls=other) as client, pytest.raises(ServiceError, match=why):
            client.join(None, {})
        with connection(address, wait_seconds=1.0) as client, pytest.raises(ServiceError, match="does not answer"):
            client.join(None, {})
    with (
        served(CASE) as (_, address, _),
        connection(address, tls=encryption(tmp_path / "mine.pem", serves=False)) as client,
        pytest.raises(ServiceError, match=why),
    ):
        client.join(None, {})
    with pytest.raises(ConfigError, match=r"--tls-certificate .* cannot be used"):
        encryption(tmp_path / "mine.pem", tmp_path / "other.key", serves=True)
    with pytest.raises(ConfigError, match=r"--tls-ca .* cannot be used"):
        encryption(tmp_path / "no.pem", serves=False)


def test_settings_must_be_equal() -> None:
    message = r"settings\.x: the service has nothing, but this group has 1"
    with served(CASE) as (_, address, _), connection(address) as client, pytest.raises(ServiceError, match=message):
        client.join(None, {"x": 1})


def test_hostile_clients_do_not_delay_a_member() -> None:
    stop = threading.Event()

    def slow(address: str) -> None:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5.0) as stream:
            while not stop.is_set():
                stream.sendall(b"P")
                time.sleep(0.05)

    def repeat(address: str, content: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                raw(address, content, 1.0)

    signed = Signer(TOKEN).headers("join", b"{}", time.time())
    wrong = "".join(f"{key}: {value}\r\n" for key, value in (signed | {SIGNATURE: "0" * 64}).items())
    oversized = f"POST /changes HTTP/1.1\r\nHost: x\r\n{wrong}Content-Length: {MOST_BYTES * 100}\r\n\r\n".encode()
    contents = [b"\x00\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n", oversized + b"x" * 100_000, b"POST /" + b"a" * 20_000]
    with served(CASE) as (run, address, _), ThreadPoolExecutor(20) as pool, connection(address) as client:
        client.join(None, {})
        for number in range(20):
            pool.submit(slow, address) if number % 5 == 0 else pool.submit(repeat, address, contents[number % 4])
        try:
            time.sleep(0.5)
            seconds = []
            for _ in range(20):
                started = time.monotonic()
                client.request("heartbeat")
                seconds.append(time.monotonic() - started)
            assert sorted(seconds)[len(seconds) // 2] < 0.5
            assert len(run.members) == 1
        finally:
            stop.set()


def test_a_client_waits_for_a_service_that_starts_again() -> None:
    with served(CASE) as (_, address, _), connection(address) as client:
        client.join(None, {})
        session = client.session
    with connection(address) as client:
        client.leave()  # of a service that has ended: no wait
    message = r"does not answer for 1 s .*start it again"
    with connection(address, TOKEN, 1.0) as client, pytest.raises(ServiceError, match=message):
        client.join(None, {})
    with connection(address) as client:
        client.session = session
        answer = client.start(client.post("heartbeat", {"session": session}))
        time.sleep(0.3)
        assert not answer.done()
        with served(CASE, port=int(address.rpartition(":")[2])):
            assert answer.result(30) is None
        assert client.is_lost
