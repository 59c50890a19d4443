"""Twenty clients that mean harm to a coordinator.

``python -m sdp.tests.support.clusters.hostile HOST PORT TOKEN_FILE`` runs them until it is killed.
The token is only for what they have recorded of an honest client.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdp.engine.elastic.coordination.messages import MAGIC, Channel

COUNT = 20


def recorded(host: str, port: int, token: bytes) -> bytes:
    """What an honest client sends, as somebody on the line sees it."""
    with socket.create_connection((host, port)) as connection:
        channel = Channel(token, is_server=False)
        channel.feed(connection.recv(1 << 12))
        return channel.greeting + channel.seal({"type": "bye"})


@contextmanager
def hostile_clients(host: str, port: int, replay: bytes) -> Iterator[None]:
    """Let the clients do harm inside the context."""
    end = threading.Event()
    clients = [
        threading.Thread(target=_harm, args=((host, port), replay, number % 5, end), daemon=True)
        for number in range(COUNT)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        end.set()
        for client in clients:
            client.join(10)


def _harm(address: tuple[str, int], replay: bytes, kind: int, end: threading.Event) -> None:
    """Connect again and again, and be slow, send garbage, repeat a recorded message or send too
    much.
    """
    while not end.is_set():
        try:
            with socket.create_connection(address, timeout=5) as connection:
                if kind == 0:  # slow: one byte at a time
                    for byte in MAGIC + os.urandom(8):
                        connection.sendall(bytes([byte]))
                        if end.wait(0.1):
                            return
                elif kind == 1:
                    connection.sendall(os.urandom(4096))
                elif kind == 2:
                    connection.sendall(replay)
                elif kind == 3:  # a length of 4 GB, and then as much as goes
                    connection.sendall(MAGIC + os.urandom(32) + b"\xff\xff\xff\xff" + bytes(1 << 20))
                else:  # a message of the right length under a wrong token
                    channel = Channel(b"another secret", is_server=False)
                    channel.feed(connection.recv(1 << 12))
                    connection.sendall(channel.greeting + channel.seal({"type": "bye"}))
                connection.settimeout(0.2)
                while connection.recv(1 << 12):
                    pass
        except OSError:
            end.wait(0.05)


if __name__ == "__main__":
    host, port, token = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).read_bytes().strip()
    with hostile_clients(host, port, recorded(host, port, token)):
        print("they are here", flush=True)
        threading.Event().wait()
