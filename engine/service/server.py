"""The HTTP server of the service, which answers the requests of groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from aiohttp import web

from ..distributed.agreement import first_difference
from ..errors import ServiceError, shorten
from ..json_files import parse_json
from .rounds import Member, ServedRun, UnknownMemberError
from .wire import DIGEST, MOST_BYTES, NONCE, Signer, fits, pack, slice_of, unpack

log = logging.getLogger("sdp")

_TICK_SECONDS = 0.02
_BODY_SECONDS = 120.0  # until the body of a request must have arrived

Answer = dict[str, Any] | bytes


class Server:
    """Serves a run whose groups come and go, until the run has ended.

    Args:
        run: The state of the run.
        token: The secret with which messages are signed.
        settings: The settings that all groups must have, as JSON.
        on_closed: Called after each average, with its line of metrics.jsonl.
        on_dealt: Called when samples were assigned to a group, before the answer is sent to it.
        on_evaluation: Called after each evaluation, with its line of evaluations.jsonl.
    """

    def __init__(
        self, run: ServedRun, token: bytes, settings: Mapping[str, Any], *,
        on_closed: Callable[[dict[str, Any]], None],
        on_dealt: Callable[[], None],
        on_evaluation: Callable[[dict[str, Any]], None],
    ):  # fmt: skip
        self._run, self._signer, self._settings = run, Signer(token), settings
        self._on_closed, self._on_dealt, self._on_evaluation = on_closed, on_dealt, on_evaluation
        self._closed = asyncio.Event()  # set when the open average closes, and then replaced
        self._evaluated = -1  # the last step for which a group evaluates
        self._refused = 0
        self._data: str | None = None

    async def serve(
        self, host: str, port: int, tls: ssl.SSLContext | None, on_start: Callable[[int], None], stop: Sequence[int]
    ) -> None:
        """Serve until the run has ended and its groups have left, or ``stop`` contains a signal.

        If ``port`` is 0, the system chooses a free port. ``on_start`` is called with the port.
        """
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/{action}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            on_start(runner.addresses[0][1])
            await self._tick_until_end(stop)
        finally:
            await runner.cleanup()

    async def _tick_until_end(self, stop: Sequence[int]) -> None:
        run, ended_at = self._run, None
        while not stop:
            if run.tick(time.monotonic()):
                await asyncio.to_thread(run.anchors.step, *run.begin_close())
                await asyncio.to_thread(self._on_closed, run.finish_close(time.monotonic()))
                self._closed.set()
                self._closed = asyncio.Event()
            if run.has_ended:
                ended_at = ended_at or time.monotonic()  # its living groups may be in a long step, or evaluate
                evaluates = any(member.pinned is not None for member in run.members.values())
                if not run.members or (time.monotonic() - ended_at > run.wait_seconds and not evaluates):
                    return
            await asyncio.sleep(_TICK_SECONDS)

    # -- requests ----------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.Response:
        action = request.match_info["action"]
        if not self._signer.accepts(action, request.headers, time.time()):
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the first, second, fourth, …
                log.warning("refused %d requests without the right token, now from %s", self._refused, request.remote)
            return web.json_response({"error": "not signed with the token of this run"}, status=401)
        status: int = 200
        answer: Answer = b""
        try:
            body = await asyncio.wait_for(request.read(), _BODY_SECONDS)
            if not fits(body, request.headers):
                raise ServiceError(f"the body is not the one that was signed ({DIGEST})")
            answer = await self._act(action, body)
        except UnknownMemberError as error:
            status, answer = 409, {"error": str(error)}
        except (ServiceError, ValueError, KeyError, TypeError, TimeoutError, web.HTTPRequestEntityTooLarge) as error:
            status, answer = 400, {"error": shorten(f"{action}: {error}")}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = self._signer.headers(f"{status}", content, time.time(), request.headers[NONCE])
        return web.Response(body=content, status=status, headers=headers)

    async def _act(self, action: str, body: bytes) -> Answer:
        head, _, slices = body.partition(b"\n")  # a line of JSON; slices may follow
        request = parse_json(head.decode())
        answer = getattr(self, f"do_{action}", None)
        if answer is None:
            raise ServiceError("the service has no such request")
        member = None if action == "join" else self._run.member(request["session"], time.monotonic())
        return await answer({**request, "changes": slices}, member)

    async def do_join(self, request: Any, _: None) -> Answer:
        if request["settings"] != self._settings:
            where, mine, others = first_difference("settings", self._settings, request["settings"])
            raise ServiceError(
                f"{where}: the service has {shorten(mine)}, but this group has {shorten(others)}; use the same "
                "configuration"
            )
        member = self._run.join(request["slot"], time.monotonic())
        return {"session": None} if member is None else {"session": member.session, "slot": member.slot}

    async def do_begin(self, request: Any, member: Member) -> Answer:
        self._data = self._data or str(request["data"])
        if self._data != request["data"]:
            raise ServiceError("this group has another corpus than the other groups; give all groups the same data")
        micro_batches, width, ranks = (int(request[key]) for key in ("micro_batches", "width", "data_ranks"))
        return {"closed": self._run.begin(member, micro_batches, width, ranks, time.monotonic())}

    async def do_heartbeat(self, _: Any, member: Member) -> Answer:
        return self._run.status(member)

    async def do_lease(self, request: Any, member: Member) -> Answer:
        number, before = int(request["number"]), len(member.shares)
        if number > before:
            raise ServiceError(
                f"share {number} of the data was requested before share {before}; request shares in order"
            )
        share = self._run.lease(member, number)
        if len(member.shares) > before:
            self._on_dealt()
        assert self._run.order is not None
        return {"share": share, "width": self._run.order.width}

    async def do_changes(self, request: Any, member: Member) -> Answer:
        changes = await asyncio.to_thread(unpack, request["changes"])
        self._run.receive(member, int(request["average"]), changes, len(request["changes"]))
        return {}

    async def do_deliver(self, request: Any, member: Member) -> Answer:
        samples, new_samples, loss, seconds = request["facts"]
        facts = int(samples), int(new_samples), float(loss), float(seconds)
        self._run.deliver(member, int(request["average"]), int(request["rank"]), int(request["ranks"]), facts)
        return {}

    async def do_wait(self, request: Any, member: Member) -> Answer:
        if self._run.closed < int(request["average"]) and not self._run.has_ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), min(60.0, float(request["seconds"])))
        return self._run.status(member)

    async def do_anchors(self, request: Any, member: Member) -> Answer:
        pieces = [slice_of(value) for value in request["slices"]]
        if sum(4 * torch.Size(piece.shape).numel() for piece in pieces) > MOST_BYTES:
            raise ServiceError(f"an answer has at most {MOST_BYTES} bytes; request fewer slices")

        def read() -> bytes:
            found = self._run.anchors.read(pieces, member.pinned if request["pinned"] else None)
            return pack((piece, tensor, "none") for piece, tensor in zip(pieces, found, strict=True))

        return await asyncio.to_thread(read)

    async def do_claim(self, request: Any, member: Member) -> Answer:
        """Let the first group that asks evaluate the full model, with a copy of the anchors."""
        is_first = int(request["step"]) > self._evaluated
        if is_first:
            self._evaluated = int(request["step"])
            member.pinned, _ = await asyncio.to_thread(self._run.anchors.snapshot)
        return {"mine": is_first}

    async def do_evaluation(self, request: Any, member: Member) -> Answer:
        if member.pinned is not None:
            self._on_evaluation(request["line"] | {"tokens": self._run.tokens})
        member.pinned = None
        return {}

    async def do_leave(self, _: Any, member: Member) -> Answer:
        self._run.drop(member.session, "left")
        return {}
