"""A rank's connection to the service that averages the weights of groups."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import aiohttp
import torch

from ..errors import ServiceError, shorten
from ..json_files import parse_json
from .anchors import Slice
from .wire import MOST_BYTES, NONCE, Part, Signer, fits, messages_of, pack, unpack

log = logging.getLogger("sdp")

_PAUSE_SECONDS = 0.5  # seconds before a request is made again
_REQUEST_SECONDS = 300.0
_ANSWER_BYTES = MOST_BYTES + (1 << 20)  # the largest answer that is read
_UNKNOWN = {"closed": 0, "grace": False}
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)


class Client:
    """A rank's connection to the service. Requests are made in a thread of their own.

    While the service does not answer, a request is repeated for up to ``wait_seconds``. A group may
    have lost its membership, because it was dropped or the service has started again. Then
    ``is_lost`` is True, and requests return nothing, until the group joins again.

    Messages are signed with the ``token``, and encrypted if ``tls`` has certificates to trust.
    """

    def __init__(self, address: str, token: bytes, wait_seconds: float, tls: ssl.SSLContext | None = None):
        self.address, self._signer, self._wait_seconds = address, Signer(token), wait_seconds
        self.session, self.is_lost = "", False
        self.status: dict[str, Any] = _UNKNOWN  # the newest answer to a heartbeat
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="service", daemon=True).start()
        self._http = self.start(self._open(tls)).result()

    async def _open(self, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            f"http{'s' * (tls is not None)}://{self.address}", connector=aiohttp.TCPConnector(ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS, sock_connect=10.0),
            headers={"Accept-Encoding": "identity"}, auto_decompress=False,  # an answer could become gigabytes
        )  # fmt: skip

    def close(self) -> None:
        """End the connection and its thread."""
        self.start(self._http.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run the coroutine ``work`` in the thread of the connection, and return a future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def request(self, action: str, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer, which is {} if this group is no member any more."""
        return self.start(self.post(action, {"session": self.session, **values})).result() or {}

    async def post(self, action: str, request: dict[str, Any], slices: bytes = b"") -> Any:
        """Send a request until it is answered. If this group is no member any more, return None.

        Raises:
            ServiceError: The service refuses, or does not answer for ``wait_seconds``.
        """
        waits_until, warn = time.monotonic() + self._wait_seconds, log.warning
        while True:
            try:
                return await self._post_once(action, request, slices)
            except aiohttp.ClientSSLError as error:
                why = f"no encrypted connection ({shorten(error)})"
                raise ServiceError(f"{self.address}: {why}; give the service's certificate with --tls-ca") from None
            except _NO_ANSWER as error:
                problem = f"the service at {self.address} does not answer"
                if time.monotonic() > waits_until:
                    seconds = f"{self._wait_seconds:g} s ({shorten(error)})"
                    raise ServiceError(f"{problem} for {seconds}; start it again with sdp serve") from None
                warn("%s (%s); waiting for it", problem, shorten(error))
                warn = log.debug  # once is enough
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _post_once(self, action: str, request: dict[str, Any], slices: bytes = b"") -> Any:
        content = json.dumps(request).encode() + (b"\n" + slices if slices else b"")
        headers = self._signer.headers(action, content, time.time())
        async with self._http.post(f"/{action}", data=content, headers=headers) as response:
            if response.status == 401:
                raise ServiceError(f"the service at {self.address} has another token, or the clocks differ by minutes")
            is_answer = response.headers.get(NONCE) == headers[NONCE]
            if not is_answer or not self._signer.is_signed(f"{response.status}", response.headers):
                raise ServiceError(f"{self.address} is not the service of this run, because its answer is not signed")
            if response.content_length is None or response.content_length > _ANSWER_BYTES:
                raise ServiceError(f"{self.address}: has more than {_ANSWER_BYTES:,} bytes, or a proxy cut the length")
            answer = await response.read()
            if not fits(answer, response.headers):
                raise aiohttp.ClientPayloadError("the answer is damaged")
        if response.status == 409:
            self.is_lost = self.is_lost or request["session"] == self.session
            return None
        if response.status != 200:
            raise ServiceError(str(parse_json(answer.decode())["error"]))
        return answer if action == "anchors" else parse_json(answer.decode())

    def join(self, slot: int | None, settings: dict[str, Any]) -> int:
        """Make this group a member of the run, and return its slot (its number in the placement).

        If all slots are taken, wait for up to ``wait_seconds``. ``slot`` is an earlier one or None.
        """
        waits_until = time.monotonic() + self._wait_seconds
        while (answer := self.request("join", slot=slot, settings=settings))["session"] is None:
            if time.monotonic() > waits_until:
                raise ServiceError(f"the run at {self.address} already has all of its groups (sdp.groups)")
            time.sleep(_PAUSE_SECONDS)
        self.session, self.is_lost, self.status = answer["session"], False, _UNKNOWN
        return int(answer["slot"])

    def leave(self) -> None:
        """Tell the service that this group ends. Nothing happens if the service has ended."""
        with suppress(*_NO_ANSWER, ServiceError):
            self.start(self._post_once("leave", {"session": self.session})).result()

    def beat_every(self, seconds: float) -> None:
        """Send a heartbeat every ``seconds`` seconds, and keep the newest answer in ``status``."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(seconds)
                session = self.session
                with suppress(*_NO_ANSWER, ServiceError):  # the next request waits, or says what is wrong
                    status = await asyncio.wait_for(self._post_once("heartbeat", {"session": session}), 2 * seconds)
                    self.status = status if status and session == self.session else self.status

        self.start(beat())

    async def deliver(self, request: dict[str, Any], changes: Iterable[Part]) -> None:
        """Send this rank's changes of weights in messages, and then the request itself."""
        for message in messages_of(changes):
            await self.post("changes", request, await asyncio.to_thread(pack, message))
        await self.post("deliver", request)

    def fetch(self, wanted: Iterable[tuple[Slice, torch.Tensor]]) -> None:
        """Fill the ``wanted`` tensors in host memory with the service's weights (the anchors).

        If this group is not a member any more, nothing is filled.
        """
        for message in messages_of((piece, tensor, "none") for piece, tensor in wanted):
            request = {"session": self.session, "slices": [piece for piece, *_ in message]}
            answer = self.start(self.post("anchors", request)).result()
            found = unpack(answer) if answer else {}
            for piece, tensor, _ in message if found else ():
                tensor.copy_(found[piece])
