"""How a rank connects to the coordinator."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from ...errors import PeerLostError
from .messages import Channel, Message, ProtocolError

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2


def reach(address: tuple[str, int], token: bytes, seconds: float) -> tuple[socket.socket, Channel]:
    """Connect to the coordinator, and try again for up to ``seconds``.

    Args:
        address: HOST and port of the coordinator.
        token: the shared secret.
        seconds: how long to try.

    Raises:
        PeerLostError: it cannot be reached.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(token, is_server=False)
            connection.sendall(channel.greeting)
            _await_greeting(connection, channel)
            return connection, channel
        except (OSError, ProtocolError) as error:
            if time.monotonic() > end:
                where = f"{address[0]}:{address[1]}"
                raise PeerLostError(
                    f"the coordinator at {where} could not be reached for {seconds:g} s ({error}); if sdp coordinate "
                    "has ended, start it again at this address"
                ) from None
            time.sleep(_RETRY_SECONDS)


def is_cut_off(address: tuple[str, int], token: bytes, question: Message) -> bool:
    """Ask the coordinator, on a connection of its own, whether the others go on without this group.

    False also if it cannot be reached, or if the run is over: then it will soon be gone.
    """
    with contextlib.suppress(OSError, ProtocolError, PeerLostError):
        connection, channel = reach(address, token, 0.0)
        with connection:
            connection.sendall(channel.seal(question))
            while data := connection.recv(1 << 16):
                for answer in channel.feed(data):
                    return answer["type"] == "cut"
    return False


def _await_greeting(connection: socket.socket, channel: Channel) -> None:
    while not channel.is_open:
        data = connection.recv(len(channel.greeting))
        if not data:
            raise ProtocolError("it closed the connection")
        channel.feed(data)


def receive(
    connection: socket.socket,
    heartbeat_seconds: float,
    look_seconds: Callable[[], float],
    joined: Callable[[], float | None],
) -> bytes:
    """Return what the coordinator sends.

    The coordinator answers each heartbeat. A link that is down closes no connection.

    Args:
        connection: a connection to the coordinator.
        heartbeat_seconds: how long it may be silent.
        look_seconds: returns how often to look whether it is silent.
        joined: returns since when it answers heartbeats, or None.

    Raises:
        OSError: it is silent for too long.
    """
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while not selector.select(look_seconds()):
            since = joined()
            if since is not None and time.monotonic() - max(began, since) > heartbeat_seconds:
                raise OSError("the coordinator is silent")
    return connection.recv(1 << 16)
