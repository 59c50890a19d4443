"""Twenty clients that mean harm to a coordinator.

``python -m sdp.tests.support.clusters.hostile HOST PORT TOKEN_FILE`` runs them until it is killed.
It answers each line of its input with what the clients have done so far, as one line of JSON.
The token is only for what they have recorded of an honest client.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sdp.engine.elastic.coordination.messages import MAGIC, Channel

COUNT = 20
KINDS = ("slow", "silent", "garbage", "replayed", "oversized", "wrong token")
HOLDING = ("slow", "silent")  # they keep their connections until the coordinator closes them
BYTE_SECONDS = 1.0  # between two bytes of a slow client


def recorded(host: str, port: int, token: bytes) -> bytes:
    """What an honest client sends, as somebody on the line sees it."""
    with socket.create_connection((host, port)) as connection:
        channel = Channel(token, is_server=False)
        channel.feed(connection.recv(1 << 12))
        return channel.greeting + channel.seal({"type": "bye"})


class Client(threading.Thread):
    """Connects again and again, and does harm of one kind.

    Args:
        address: HOST and port of the coordinator.
        kind: one of ``KINDS``.
        replay: the bytes of an honest client, for the kind "replayed".
        end: ends the client.

    Attributes:
        connections: how often it has connected.
        sent: the bytes that it has sent, except those of a send that failed.
        is_connected: whether it has a connection now.
    """

    def __init__(self, address: tuple[str, int], kind: str, replay: bytes, end: threading.Event):
        super().__init__(daemon=True)
        self._address, self.kind, self._replay, self._end = address, kind, replay, end
        self.connections = self.sent = 0
        self.is_connected = False

    def run(self) -> None:
        """Do harm until the end."""
        while not self._end.is_set():
            with suppress(OSError), socket.create_connection(self._address, timeout=5) as connection:
                self.connections += 1
                self.is_connected = True
                self._harm(connection)
                self._hear_to_the_end(connection)
            self.is_connected = False
            self._end.wait(0.05)

    def _harm(self, connection: socket.socket) -> None:
        if self.kind == "slow":
            for byte in MAGIC + os.urandom(32):
                self._send(connection, bytes([byte]))
                if self._end.wait(BYTE_SECONDS):
                    return
        elif self.kind == "garbage":
            self._send(connection, os.urandom(4096))
        elif self.kind == "replayed":
            self._send(connection, self._replay)
        elif self.kind == "oversized":  # a length of 4 GB, and then as much as the coordinator takes
            self._send(connection, MAGIC + os.urandom(32) + b"\xff\xff\xff\xff")
            self._send(connection, bytes(1 << 20))
        elif self.kind == "wrong token":
            channel = Channel(b"another secret", is_server=False)
            channel.feed(connection.recv(1 << 12))
            self._send(connection, channel.greeting + channel.seal({"type": "bye"}))

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent += len(data)

    def _hear_to_the_end(self, connection: socket.socket) -> None:
        """Read until the coordinator closes the connection."""
        connection.settimeout(0.2)
        while not self._end.is_set():
            with suppress(TimeoutError):
                if not connection.recv(1 << 12):
                    return


@contextmanager
def hostile_clients(host: str, port: int, replay: bytes) -> Iterator[list[Client]]:
    """Let the clients do harm inside the context. Yields them."""
    end = threading.Event()
    clients = [Client((host, port), KINDS[number % len(KINDS)], replay, end) for number in range(COUNT)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        end.set()
        for client in clients:
            client.join(10)


class Attack:
    """The hostile clients in a process of their own, so that they share no lock with a test."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def count(self) -> dict[str, Counter[str]]:
        """Return what the clients of each kind have done so far, or do now.

        The keys are "connections" that were made, bytes "sent", and clients "connected" now.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("count\n")
        self._process.stdin.flush()
        return {kind: Counter(done) for kind, done in json.loads(self.line()).items()}

    def idle_kinds(self, before: dict[str, Counter[str]]) -> list[str]:
        """Return the kinds of clients that have done nothing since the count ``before``.

        Those that hold connections must have one. The others must have made one, and all but the
        silent ones must have sent something.
        """
        now = self.count()
        return [
            kind
            for kind in KINDS
            if (kind in HOLDING and not now[kind]["connected"])
            or (kind not in HOLDING and now[kind]["connections"] == before[kind]["connections"])
            or (kind != "silent" and now[kind]["sent"] == before[kind]["sent"])
        ]

    def line(self) -> str:
        """Return the next line of the process's output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def attacked(host: str, port: int, token_file: Path) -> Iterator[Attack]:
    """A context in which another process attacks. All clients have connected when it begins."""
    words = [sys.executable, "-P", "-m", __name__, host, str(port), str(token_file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            attack = Attack(process)
            assert attack.line() == "they are here\n"
            yield attack
        finally:
            process.kill()


def _counts(clients: list[Client]) -> dict[str, Any]:
    found = {kind: Counter[str]() for kind in KINDS}
    for client in clients:
        found[client.kind].update(connections=client.connections, sent=client.sent, connected=int(client.is_connected))
    return found


def _main(host: str, port: int, token: bytes) -> None:
    with hostile_clients(host, port, recorded(host, port, token)) as clients:
        while not all(client.connections for client in clients):
            threading.Event().wait(0.01)
        print("they are here", flush=True)
        for _ in sys.stdin:
            print(json.dumps(_counts(clients)), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).read_bytes().strip())
