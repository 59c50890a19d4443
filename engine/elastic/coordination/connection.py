"""How a rank connects to the coordinator."""

from __future__ import annotations

import socket
import time

from ...errors import PeerLostError
from .messages import Channel, ProtocolError

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
                raise PeerLostError(f"the coordinator at {where} cannot be reached ({error})") from None
            time.sleep(_RETRY_SECONDS)


def _await_greeting(connection: socket.socket, channel: Channel) -> None:
    while not channel.is_open:
        data = connection.recv(len(channel.greeting))
        if not data:
            raise ProtocolError("it closed the connection")
        channel.feed(data)
