"""The HTTP server of the service, which answers the requests of groups."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from aiohttp import web

from ..distributed.agreement import first_difference
from ..errors import ServiceError, shorten
from ..json_files import parse_json
from .rounds import ServedRun, UnknownMemberError
from .wire import DIGEST, MOST_BYTES, NONCE, Signer, fits, pack, slice_of, unpack

log = logging.getLogger("sdp")

Record = Callable[[str, dict[str, Any]], None]
_TICK_SECONDS = 0.02
_WAIT_SECONDS = 2.0
_BODY_SECONDS = 120.0  # until the body of a request must have arrived


class Server:
    """Serves a run whose groups come and go, until the run has ended.

    Messages are signed with the ``token``, and all groups must have the ``settings`` (JSON).
    ``record`` gets "average" with each line of metrics.jsonl, "evaluation" with each line of
    evaluations.jsonl, and "order" with the data order, before a group gets new samples.
    """

    def __init__(self, run: ServedRun, token: bytes, settings: Mapping[str, Any], record: Record):
        self._run, self._signer, self._settings, self._record = run, Signer(token), settings, record
        self._evaluated = -1  # the last step for which a group evaluates
        self._refused, self._data = 0, ""
        self.port = 0  # at which the server listens

    async def serve(self, host: str, port: int, tls: ssl.SSLContext | None, stop: Sequence[int]) -> None:
        """Serve until the run has ended and no group lives, or ``stop`` contains a signal."""
        run = self._run
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/{action}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            self.port = runner.addresses[0][1]
            log.info("serving at %s:%d", host, self.port)
            while not stop:
                if run.tick(time.monotonic()):
                    await asyncio.to_thread(run.anchors.step, *run.begin_close())
                    await asyncio.to_thread(self._record, "average", run.finish_close(time.monotonic()))
                if run.has_ended and not run.members:  # living groups may be in a long step, or evaluate
                    return
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            await runner.cleanup()

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
        except (ServiceError, ValueError, KeyError, TypeError, OSError, web.HTTPRequestEntityTooLarge) as error:
            status, answer = 400, {"error": shorten(f"{action}: {error}")}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = self._signer.headers(f"{status}", content, time.time(), request.headers[NONCE])
        return web.Response(body=content, status=status, headers=headers)

    async def _act(self, action: str, body: bytes) -> dict[str, Any] | bytes:
        """Do what a request asks for, and return the answer. Slices may follow its line of JSON."""
        head, _, slices = body.partition(b"\n")
        request, run, now = parse_json(head.decode()), self._run, time.monotonic()
        if action == "join":
            if request["settings"] != self._settings:
                where, mine, others = first_difference("settings", self._settings, request["settings"])
                both = f"the service has {shorten(mine)}, but this group has {shorten(others)}"
                raise ServiceError(f"{where}: {both}; use the same configuration")
            member = run.join(request["slot"], now)
            return {"session": None} if member is None else {"session": member.session, "slot": member.slot}
        member = run.member(request["session"], now)
        if run.problem is not None and (action not in ("leave", "heartbeat") or "average" in request):
            raise ServiceError(f"the service has ended the run: {run.problem}")
        match action:
            case "begin":
                self._data = self._data or str(request["data"])
                if self._data != request["data"]:
                    raise ServiceError("this group has another corpus than the other groups; give all the same data")
                counts = (int(request[key]) for key in ("micro_batches", "width", "data_ranks"))
                return {"closed": run.begin(member, *counts, now=now), "width": run.order.width if run.order else 0}
            case "lease":
                before, share = len(member.shares), run.lease(member, int(request["number"]))
                if len(member.shares) > before and run.order is not None:
                    self._record("order", asdict(run.order))
                return {"share": share}
            case "changes":
                changes = await asyncio.to_thread(unpack, slices)
                run.receive(member, int(request["average"]), changes, len(slices))
            case "deliver":
                samples, new_samples, loss, seconds = request["facts"]
                facts = int(samples), int(new_samples), float(loss), float(seconds)
                run.deliver(member, int(request["average"]), int(request["rank"]), int(request["ranks"]), facts)
            case "anchors":
                pieces = [slice_of(value) for value in request["slices"]]
                if sum(4 * torch.Size(piece.shape).numel() for piece in pieces) > MOST_BYTES:
                    raise ServiceError(f"an answer has at most {MOST_BYTES} bytes; request fewer slices")
                found = await asyncio.to_thread(run.anchors.read, pieces, member.pinned)
                return await asyncio.to_thread(pack, [(*part, "none") for part in zip(pieces, found, strict=True)])
            case "claim":  # the first group that asks evaluates the full model, with a copy of the anchors
                if is_first := (step := int(request["step"])) > self._evaluated or member.pinned is not None:
                    self._evaluated = step  # before the await, so that no second group is the first
                    member.pinned = await asyncio.to_thread(run.anchors.snapshot)
                return {"mine": is_first}
            case "evaluation":
                if member.pinned is not None:
                    tokens = run.samples * run.tokens_per_sample
                    self._record("evaluation", request["line"] | {"tokens": tokens})
                member.pinned = None
            case "leave":
                run.drop(member.session, "left")
            case "heartbeat":  # may ask to wait until an average has ended
                average = int(request.get("average", 0))
                member.pinned = None if average else member.pinned  # the answer to "claim" may have been lost
                while run.closed < average and time.monotonic() - now < _WAIT_SECONDS:
                    await asyncio.sleep(_TICK_SECONDS)
            case _:
                raise ServiceError("the service has no such request")
        return run.status(member)
