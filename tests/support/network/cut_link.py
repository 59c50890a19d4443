"""A connection on loopback that can be cut as a link is: packets vanish, and nobody is told."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutLink:
    """Passes bytes between clients and a port of this host while it is ``up``.

    What is sent while it is down waits, as TCP's repetitions do.
    """

    def __init__(self, port: int):
        self._target, self.up = port, threading.Event()
        self.up.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.up.set()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.up.wait()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        data = b" "
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            self.up.wait()
            with contextlib.suppress(OSError):
                sink.sendall(data)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
