"""Messages between the coordinator and the ranks: JSON, authenticated, of limited size, never
pickled.

Each side of a connection first sends a magic word and a random nonce. The key of the connection is
an HMAC of both nonces under the shared token. Each message carries an HMAC over its direction, its
number on this connection and its text. So a message that is recorded on one connection is worth
nothing on another, and nothing can be repeated or left out. Messages are not encrypted: they have
no secrets.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import Any

from ...json_files import parse_json

MAGIC = b"SDPELAS1"
MOST_BYTES = 64 * 1024  # of a message to the coordinator
MOST_ANSWER_BYTES = 64 * MOST_BYTES  # of a message from it, which has the facts of all ranks
_NONCE, _DIGEST, _LENGTH = 32, 32, 4
_GREETING = len(MAGIC) + _NONCE

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side is not one of ours: garbage, a wrong token, a replay, or too long a
    message.
    """


class Channel:
    """One side of a connection, without its socket.

    Args:
        token: the shared secret.
        is_server: whether this side is the coordinator.

    Attributes:
        greeting: the bytes to send first.
        is_trusted: whether a message of the other side was authentic.
    """

    def __init__(self, token: bytes, *, is_server: bool):
        self._token, self._is_server = token, is_server
        self._nonce = os.urandom(_NONCE)
        self.greeting = MAGIC + self._nonce
        self.is_trusted = False
        self._key: bytes | None = None
        self._received = bytearray()
        self._sent = self._heard = 0  # numbers of messages

    @property
    def is_open(self) -> bool:
        """Whether the other side's greeting has arrived, so that messages can be sent."""
        return self._key is not None

    def seal(self, message: Message) -> bytes:
        """Return the bytes of the next message."""
        assert self._key is not None, "the other side's greeting comes before the first message"
        text = json.dumps(message, separators=(",", ":")).encode()
        most = MOST_ANSWER_BYTES if self._is_server else MOST_BYTES
        if len(text) > most:
            raise ValueError(f"a message of {len(text):,} bytes is longer than {most:,}")
        digest = self._digest(self._is_server, self._sent, text)
        self._sent += 1
        return len(text).to_bytes(_LENGTH, "big") + digest + text

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes.

        Raises:
            ProtocolError: the other side must not be listened to any more.
        """
        self._received += data
        if self._key is None and not self._take_greeting():
            return []
        messages = []
        while (message := self._take_message()) is not None:
            messages.append(message)
        return messages

    def _take_greeting(self) -> bool:
        start = bytes(self._received[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise ProtocolError("it does not speak this protocol")
        if len(self._received) < _GREETING:
            return False
        theirs = bytes(self._received[len(MAGIC) : _GREETING])
        del self._received[:_GREETING]
        nonces = self._nonce + theirs if self._is_server else theirs + self._nonce
        self._key = hmac.digest(self._token, MAGIC + nonces, hashlib.sha256)
        return True

    def _take_message(self) -> Message | None:
        if len(self._received) < _LENGTH:
            return None
        size = int.from_bytes(self._received[:_LENGTH], "big")
        if size > (MOST_BYTES if self._is_server else MOST_ANSWER_BYTES):
            raise ProtocolError(f"a message of {size:,} bytes")
        end = _LENGTH + _DIGEST + size
        if len(self._received) < end:
            return None
        digest, text = (
            bytes(self._received[_LENGTH : _LENGTH + _DIGEST]),
            bytes(self._received[_LENGTH + _DIGEST : end]),
        )
        del self._received[:end]
        if not hmac.compare_digest(digest, self._digest(not self._is_server, self._heard, text)):
            raise ProtocolError("a message with another token, or a repeated one")
        self._heard += 1
        self.is_trusted = True
        try:
            message = parse_json(text.decode())
        except ValueError:
            raise ProtocolError("a message that is not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ProtocolError("a message without a type")
        return message

    def _digest(self, from_server: bool, number: int, text: bytes) -> bytes:
        assert self._key is not None
        head = (b"S" if from_server else b"C") + number.to_bytes(8, "big")
        return hmac.digest(self._key, head + text, hashlib.sha256)
