"""The HTTP server of the service, which answers the requests of groups."""

from __future__ import annotations

import asyncio
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
from .rounds import ServedRun, UnknownMemberError
from .wire import DIGEST, MOST_BYTES, NONCE, Signer, fits, pack, slice_of, unpack

log = logging.getLogger("sdp")

_TICK_SECONDS = 0.02
_BODY_SECONDS = 120.0  # until the body of a request must have arrived


class Server:
    """Serves a run whose groups come and go, until the run has ended.

    Messages are signed with the ``token``, and all groups must have the ``settings`` (JSON).
    ``on_closed`` is called after each average, with its line of metrics.jsonl, and
    ``on_evaluation`` after each evaluation, with its line of evaluations.jsonl. ``on_dealt`` is
    called when samples were assigned to a group, before the answer is sent to it.
    """

    def __init__(
        self, run: ServedRun, token: bytes, settings: Mapping[str, Any], *, on_closed: Callable[[dict[str, Any]], None],
        on_dealt: Callable[[], None], on_evaluation: Callable[[dict[str, Any]], None],
    ):  # fmt: skip
        self._run, self._signer, self._settings = run, Signer(token), settings
        self._on_closed, self._on_dealt, self._on_evaluation = on_closed, on_dealt, on_evaluation
        self._evaluated = -1  # the last step for which a group evaluates
        self._refused = 0
        self._data: str | None = None

    async def serve(
        self, host: str, port: int, tls: ssl.SSLContext | None, on_start: Callable[[int], None], stop: Sequence[int]
    ) -> None:
        """Serve until the run has ended and its groups have left, or ``stop`` contains a signal.

        If ``port`` is 0, the system chooses a free port. ``on_start`` is called with the port.
        """
        run, ended_at = self._run, None
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/{action}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            on_start(runner.addresses[0][1])
            while not stop:
                if run.tick(now := time.monotonic()):
                    await asyncio.to_thread(run.anchors.step, *run.begin_close())
                    await asyncio.to_thread(self._on_closed, run.finish_close(time.monotonic()))
                if run.has_ended:
                    ended_at = ended_at or now  # its living groups may be in a long step, or evaluate
                    evaluates = any(member.pinned is not None for member in run.members.values())
                    if not run.members or (now - ended_at > run.wait_seconds and not evaluates):
                        return
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            await runner.cleanup()

    # -- requests ----------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.Response:
        action = request.match_info["action"]
        if not self._signer.accepts(action, request.headers, time.time()):
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the first, second, fourth, …
                log.warning("refused %d requests without the right token, now from %s", self._refused, request.remote)
            return web.json_response({"error": "not signed with the token of this run"}, status=401)
        try:
            body = await asyncio.wait_for(request.read(), _BODY_SECONDS)
            if not fits(body, request.headers):
                raise ServiceError(f"the body is not the one that was signed ({DIGEST})")
            status, answer = 200, await self._act(action, body)
        except UnknownMemberError as error:
            status, answer = 409, {"error": str(error)}
        except (ServiceError, ValueError, KeyError, TypeError, TimeoutError, web.HTTPRequestEntityTooLarge) as error:
            status, answer = 400, {"error": shorten(f"{action}: {error}")}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = self._signer.headers(f"{status}", content, time.time(), request.headers[NONCE])
        return web.Response(body=content, status=status, headers=headers)

    async def _act(self, action: str, body: bytes) -> dict[str, Any] | bytes:
        """Do what a request asks for, and return the answer. Slices may follow its line of JSON."""
        head, _, slices = body.partition(b"\n")
        request, run, now = parse_json(head.decode()), self._run, time.monotonic()
        if action == "join":
            return self._join(request, now)
        member = run.member(request["session"], now)
        if run.problem is not None and action != "leave":
            raise ServiceError(f"the service has ended the run: {run.problem}")
        match action:
            case "begin":
                self._data = self._data or str(request["data"])
                if self._data != request["data"]:
                    raise ServiceError("this group has another corpus than the other groups; give all the same data")
                micro_batches, width, ranks = (int(request[key]) for key in ("micro_batches", "width", "data_ranks"))
                return {"closed": run.begin(member, micro_batches, width, ranks, now)}
            case "lease":
                before, share = len(member.shares), run.lease(member, int(request["number"]))
                if len(member.shares) > before:
                    self._on_dealt()
                return {"share": share, "width": run.order.width if run.order is not None else 0}
            case "changes":
                changes = await asyncio.to_thread(unpack, slices)
                run.receive(member, int(request["average"]), changes, len(slices))
            case "deliver":
                samples, new_samples, loss, seconds = request["facts"]
                facts = int(samples), int(new_samples), float(loss), float(seconds)
                run.deliver(member, int(request["average"]), int(request["rank"]), int(request["ranks"]), facts)
            case "anchors":
                return await asyncio.to_thread(self._read, request["slices"], member.pinned)
            case "claim":  # the first group that asks evaluates the full model, with a copy of the anchors
                is_first = int(request["step"]) > self._evaluated
                if is_first:
                    self._evaluated = int(request["step"])
                    member.pinned, _ = await asyncio.to_thread(run.anchors.snapshot)
                return {"mine": is_first}
            case "evaluation":
                if member.pinned is not None:
                    self._on_evaluation(request["line"] | {"tokens": run.samples * run.tokens_per_sample})
                member.pinned = None
            case "leave":
                run.drop(member.session, "left")
            case "heartbeat":
                pass
            case _:
                raise ServiceError("the service has no such request")
        return run.status(member)

    def _join(self, request: Any, now: float) -> dict[str, Any]:
        if request["settings"] != self._settings:
            where, mine, others = first_difference("settings", self._settings, request["settings"])
            both = f"the service has {shorten(mine)}, but this group has {shorten(others)}"
            raise ServiceError(f"{where}: {both}; use the same configuration")
        member = self._run.join(request["slot"], now)
        return {"session": None} if member is None else {"session": member.session, "slot": member.slot}

    def _read(self, slices: list[Any], snapshot: Mapping[str, torch.Tensor] | None) -> bytes:
        pieces = [slice_of(value) for value in slices]
        if sum(4 * torch.Size(piece.shape).numel() for piece in pieces) > MOST_BYTES:
            raise ServiceError(f"an answer has at most {MOST_BYTES} bytes; request fewer slices")
        found = self._run.anchors.read(pieces, snapshot)
        return pack((piece, tensor, "none") for piece, tensor in zip(pieces, found, strict=True))
