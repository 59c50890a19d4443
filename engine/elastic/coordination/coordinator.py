"""The coordinator's socket: one thread that listens, reads, writes and never waits for a single
client.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import LaunchError, shorten
from .membership import Membership
from .messages import Channel, Message, ProtocolError

_TICK_SECONDS = 0.05
_STOPPED_SHARE = 0.75  # of a heartbeat; ranks close connections after 0.8 to 1 heartbeats without an answer
_LATE_SHARE = 0.25  # of a heartbeat after a stop, in which the end of a connection may still arrive
_TRUST_SECONDS = 5.0  # how long a client may take until its first authentic message
_MOST_STRANGERS = 64  # clients without an authentic message; the oldest is dropped for a new one
_MOST_UNSENT = 1 << 20  # bytes; a client that does not read them is dropped
_READ_BYTES = 1 << 16
_READS_A_TURN = 4  # of one client, before the others have their turn
_READS_OF_ALL = 64  # after a stop


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    channel: Channel
    address: str
    since: float
    unsent: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


class Coordinator:
    """Serves one run. It has no state on disk: after a restart, the ranks tell it what it must
    know.

    Args:
        groups: the number of SDP groups.
        ranks: the ranks of each group.
        token: the shared secret.
        say: reports a line to the user.
        host: the address to listen on.
        port: the port, 0 for a free one.
        heartbeat_seconds: see ``sdp.elastic``.
        wait_seconds: see ``sdp.elastic``.
        min_groups: see ``sdp.elastic``. None: all groups.
        last_call_seconds: see ``sdp.elastic``.

    Raises:
        LaunchError: the address is not this host's, or the port is in use.
    """

    def __init__(
        self,
        groups: int,
        ranks: int,
        token: bytes,
        say: Callable[[str], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_seconds: float = 5.0,
        wait_seconds: float = 600.0,
        min_groups: int | None = None,
        last_call_seconds: float = 30.0,
    ):
        self._token, self._say, self._heartbeat = token, say, heartbeat_seconds
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listening = socket.create_server((host, port), family=family, backlog=256)
        except (OSError, TypeError, OverflowError) as error:  # TypeError: no host can have this name
            reason = getattr(error, "strerror", None) or error
            raise LaunchError(
                f"the coordinator cannot listen on {shorten(host)}:{port} ({shorten(reason, 80)}); name another address"
            ) from None
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()[:2]
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self.membership = Membership(
            groups,
            ranks,
            send=self._send,  # type: ignore[arg-type]
            close=self._close,  # type: ignore[arg-type]
            say=say,
            heartbeat_seconds=heartbeat_seconds,
            wait_seconds=wait_seconds,
            min_groups=min_groups,
            last_call_seconds=last_call_seconds,
        )
        self._awake = 0.0  # when the thread last looked at the clock
        self._woke_up = float("-inf")  # after it was stopped
        self._left: list[tuple[_Client, str]] | None = None  # after a stop: clients whose connections ended
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where the ranks find it, as HOST:PORT."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread = threading.Thread(target=self.serve, name="coordinator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, and close all connections."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()

    def serve(self) -> None:
        """Serve until :meth:`stop`."""
        last = self._awake = time.monotonic()
        try:
            while not self._stops.is_set():
                ready = self._selector.select(_TICK_SECONDS)
                self._look_for_stop()
                for key, events in ready:
                    if key.fileobj is self._listening:
                        self._accept()
                    else:
                        self._serve_client(key.data, events)
                self._look_for_stop()
                if time.monotonic() - last >= _TICK_SECONDS:
                    last = time.monotonic()
                    self.membership.tick()
                    self._drop_strangers(last)
        finally:
            for client in list(self._clients):
                self._close(client)
            self._selector.close()
            self._listening.close()

    def _look_for_stop(self) -> None:
        """Look whether this process was stopped. Ranks close connections that are silent.

        What they sent before is read first. Then all groups may come back if some have left.
        """
        before, self._awake = self._awake, time.monotonic()
        if self._left is not None or self._awake - before <= _STOPPED_SHARE * self._heartbeat:
            return
        self._left, self._woke_up = [], self._awake
        for client in list(self._clients):
            if not client.is_closed:
                self._read(client, turns=_READS_OF_ALL)
        left, self._left = self._left, None
        self.membership.wake_up({client for client, _ in left})
        for client, cause in left:
            self._end(client, cause)

    def _accept(self) -> None:
        for _ in range(_READS_A_TURN):
            try:
                connection, address = self._listening.accept()
            except OSError:  # none left, or too many open files
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            strangers = [client for client in self._clients if not client.channel.is_trusted]
            if len(strangers) >= _MOST_STRANGERS:
                self._close(min(strangers, key=lambda client: client.since))
            client = _Client(connection, Channel(self._token, is_server=True), str(address[0]), time.monotonic())
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)
            self._write(client, client.channel.greeting)

    def _serve_client(self, client: _Client, events: int) -> None:
        if client.is_closed:
            return
        if events & selectors.EVENT_WRITE:
            self._write(client, b"")
        if events & selectors.EVENT_READ and not client.is_closed:
            self._read(client)

    def _read(self, client: _Client, turns: int = _READS_A_TURN) -> None:
        for _ in range(turns):
            try:
                data = client.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(client, error.strerror or "its connection broke")
                return
            if not data:
                self._end(client, "its connection was closed")
                return
            try:
                for message in client.channel.feed(data):
                    if not client.is_closed:
                        self.membership.hear(client, message)
            except ProtocolError as error:
                self._end(client, str(error))
                return
            if client.is_closed:
                return

    def _drop_strangers(self, now: float) -> None:
        for client in list(self._clients):
            if not client.channel.is_trusted and now - client.since > _TRUST_SECONDS:
                self._close(client)

    def _send(self, client: _Client, message: Message) -> None:
        if not client.is_closed and client.channel.is_open:
            self._write(client, client.channel.seal(message))

    def _write(self, client: _Client, data: bytes) -> None:
        client.unsent += data
        try:
            while client.unsent:
                del client.unsent[: client.socket.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return  # reading finds the broken connection, and ends it
        if len(client.unsent) > _MOST_UNSENT:
            self._end(client, "it reads no messages")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if not client.is_closed:
            self._selector.modify(client.socket, events, client)

    def _end(self, client: _Client, cause: str) -> None:
        """Close a connection, and count its group as lost if it was a rank's."""
        self._look_for_stop()
        if self._left is not None:
            self._left.append((client, cause))
            return
        if time.monotonic() - self._woke_up < _LATE_SHARE * self._heartbeat:
            self.membership.wake_up({client})
        self.membership.lose(client, cause)
        self._close(client)

    def _close(self, client: _Client) -> None:
        if client.is_closed:
            return
        client.is_closed = True
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
