"""Real servers of S3 (moto's) and of Google's storage (gcp-storage-emulator) on this host, behind a
proxy that breaks requests on demand.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote

import pytest
from sdp.engine.environment.detect import free_port

Scheme = Literal["s3", "gs"]


@dataclass
class Fault:
    """What happens to the requests of ``method`` whose path contains ``word``.

    Attributes:
        kind: "cut" closes the connection in the middle of the body, "full" answers 507, "broken"
            503, and "slow" waits before the request is passed on.
        method: such as PUT, also of Google's uploads.
        word: a part of the path, which ends with the name of an uploaded file.
        times: how many requests are broken.
        seen: how many have been.
    """

    kind: Literal["cut", "full", "broken", "slow"]
    method: str
    word: str
    times: int = 10**9
    seen: int = 0


@dataclass
class FaultyServer:
    """The address of the proxy, and its faults, which a test may change at any time."""

    scheme: Scheme
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bucket(self) -> str:
        return f"{self.scheme}://bucket"

    def variables(self) -> dict[str, str]:
        """What the environment of a process must have to use the server."""
        if self.scheme == "gs":  # without the look at the bucket's kind, which asks Google itself
            return {"STORAGE_EMULATOR_HOST": self.endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip


@contextmanager
def _store(scheme: Scheme) -> Iterator[tuple[str, int]]:
    """Start a server with an empty bucket. Skip the test where a package is missing."""
    if scheme == "s3":
        pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of another module's server
        behind: Any = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        behind.start()
        host, port = behind.get_host_and_port()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
    else:
        pytest.importorskip("gcsfs").GCSFileSystem.clear_instance_cache()
        emulator: Any = pytest.importorskip("gcp_storage_emulator.server")
        host, port = "127.0.0.1", free_port()
        behind = emulator.create_server(host, port, in_memory=True, default_bucket="bucket")
        behind.start()
    try:
        yield host, port
    finally:
        behind.stop()


@contextmanager
def faulty_server(scheme: Scheme = "s3") -> Iterator[FaultyServer]:
    """Start the server, with an empty bucket, and the proxy."""
    with _store(scheme) as (host, port), _proxy(FaultyServer(scheme), host, port) as server:
        yield server


@contextmanager
def _proxy(server: FaultyServer, host: str, port: int) -> Iterator[FaultyServer]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body, method, path = self.rfile.read(min(length, 400)), self.command, unquote(self.path.partition("?")[0])
            if method == "POST" and (name := re.search(rb'"name": ?"([^"]+)"', body)):  # Google's uploads
                method, path = "PUT", f"{path}/{name[1].decode()}"
            server.requests.append((method, path))
            fault = next(
                (fault for fault in server.faults
                 if fault.method == method and fault.word in path and fault.seen < fault.times), None
            )  # fmt: skip
            if fault is not None:
                fault.seen += 1
            if fault is not None and fault.kind == "cut":
                self.rfile.read(max(length // 2 - len(body), 0))
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            body += self.rfile.read(length - len(body))
            if fault is not None and fault.kind in ("full", "broken"):
                self._answer(507 if fault.kind == "full" else 503, {}, b"")
                return
            if fault is not None:
                time.sleep(1.0)
            connection = http.client.HTTPConnection(host, port, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
            connection.close()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle  # noqa: N815  # the names are those of http.server

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        def log_message(self, *_: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    server.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    try:
        yield server
    finally:
        proxy.shutdown()
