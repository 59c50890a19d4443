"""A rank's side of the coordinator: joins generations, votes, and hears of losses at once."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import PeerLostError
from .assembly import Assembly, Decision, Identity, Member, join_request
from .connection import is_cut_off, reach, receive
from .errors import CutOffError, RunFinishedError, StepAbortedError, UnansweredError
from .messages import Channel, Message, ProtocolError
from .progress import Progress

_RETRY_SECONDS = 0.2
_MOST_REFUSALS = 10  # connections in turn that the coordinator closes without a word
_MOST_SAID = 500  # characters
_HANG_SECONDS = 1.0  # without a connection, until a process whose main thread hangs is ended
_LOOK_SECONDS = 0.1  # how often the main thread's progress is looked at


class CoordinatorClient:
    """One rank's connection to the coordinator.

    Args:
        address: HOST and port of the coordinator.
        token: the shared secret.
        identity: who this rank is.
        heartbeat_seconds: after this long without a message, the coordinator cuts the rank off, or
            the rank connects again.
        wait_seconds: how long to try to reach the coordinator.
        progress: the main thread's signs of progress.
        on_hang: called with a message, in another thread, if the main thread hangs after the others
            have gone on without this group, or for more than ``longest_pause`` seconds.
        has_begun: returns whether the run has begun before, as its files show.

    Attributes:
        abort: set when the present generation is over.
        reason: why.
        beat_seconds: the time between two signs of life.
        given_up: returns whether a wait that began at a time takes too long.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        identity: Identity,
        *,
        heartbeat_seconds: float = 5.0,
        wait_seconds: float = 600.0,
        progress: Progress | None = None,
        on_hang: Callable[[str], None] = lambda _: None,
        longest_pause: float = math.inf,
        has_begun: Callable[[], bool] = lambda: False,
    ):
        self.progress, self._on_hang = progress or Progress(heartbeat_seconds), on_hang
        self._has_begun, self._longest_pause = has_begun, longest_pause
        self.given_up: Callable[[float], bool] = lambda _: False
        self._address, self._token, self.identity = address, token, identity
        self._where = f"{address[0]}:{address[1]}"
        self.beat_seconds, self._heartbeat, self._wait_seconds = heartbeat_seconds / 5, heartbeat_seconds, wait_seconds
        self.abort, self.reason, self._lock = threading.Event(), "", threading.Lock()
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # on this connection
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._assembly: Assembly | None = None
        self._next: Assembly | None = None  # of a reunion inside a vote
        self._joined: float | None = None  # when, on this connection
        self._has_read_all = False  # of a connection that is over
        self._is_alone = self._is_answered = False  # there is no connection; it was answered on this one
        self.is_cut_off, self._is_stuck = False, False  # the others go on without it; it hangs or waits inside
        self._request: Message = {}  # the last one to join
        self._attempt, self._generation, self._aborted = 0, -1, -1
        self._connect()
        threading.Thread(target=self._beat, name="elastic-heartbeat", daemon=True).start()

    # -- joining -----------------------------------------------------------------------------------

    def join(self, *, step: int, phase: int, fresh: bool) -> Assembly:
        """Ask for the next generation, and wait for it.

        Args:
            step: the number of steps that this rank has committed.
            phase: what comes next for this rank.
            fresh: whether the rank has no state.

        Raises:
            CutOffError: the others go on without this group.
            RunFinishedError: the run is over.
            PeerLostError: the run cannot go on, or the coordinator is gone.
        """
        if self._next is not None:
            found, self._next = self._next, None
            if not self.abort.is_set():
                return found
        return self._join(step=step, phase=phase, fresh=fresh, pending=False)

    def _join(self, *, step: int, phase: int, fresh: bool, pending: bool) -> Assembly:
        request = join_request(self.identity, self._assembly, step=step, phase=phase, fresh=fresh, pending=pending)
        refusals, self._request = 0, request
        if self._is_alone and self._has_read_all:  # otherwise the last words tell why
            self._connect()
        while True:
            self._send(request | {"begun": fresh and self._has_begun()})
            with self.progress.waiting():
                answer = self._wait_for("generation")
            if answer is not None:
                return self._take(answer)
            refusals = 0 if self._is_answered else refusals + 1
            if refusals >= _MOST_REFUSALS:
                raise PeerLostError(
                    f"the coordinator at {self._where} closes the connection at once; it needs the same token "
                    "(SDP_ELASTIC_TOKEN_FILE), configuration and number of ranks (sdp coordinate --ranks)"
                )
            time.sleep(_RETRY_SECONDS if refusals else 0)
            self._connect()

    def _take(self, answer: Message) -> Assembly:
        members, self._attempt = tuple(Member(**member) for member in answer["members"]), 0
        keys = ("name", "phase", "step", "writer", "commit_pending")
        self._assembly = Assembly(
            number=answer["generation"], members=members, expected=tuple(answer["expected"]),
            **{key: answer[key] for key in keys},
        )  # fmt: skip
        with self._lock:
            self._generation = self._assembly.number
            if self._aborted < self._generation:  # forget an abort of an earlier generation
                self.abort.clear()
        return self._assembly

    # -- voting ------------------------------------------------------------------------------------

    def vote(self, facts: Any, *, step: int, phase: int = 0) -> Decision:
        """Vote for the present step, and return when all have. Raises StepAbortedError.

        For the arguments see :meth:`ask` and :meth:`settle`.
        """
        decision = self.ask(facts)
        return decision if decision is not None else self.settle(facts, step=step, phase=phase, fresh=False)

    def ask(self, facts: Any, *, at: int | None = None) -> Decision | None:
        """Vote for the present step, and wait for the decision.

        Returns None if the coordinator is gone. Then :meth:`settle` learns if all have voted.

        Args:
            facts: a small JSON value that all ranks get if the step is committed.
            at: the number of the step for messages to the user. By default votes count them.

        Raises:
            StepAbortedError: the step is not committed.
        """
        assert self._assembly is not None
        attempt, self._attempt = self._attempt, self._attempt + 1
        number, self._request["fresh"] = self._assembly.number, False  # who votes has state
        vote: Message = {"type": "vote", "generation": number, "attempt": attempt}
        self._send(vote | {"ok": True, "facts": facts, "at": at})
        # If others do not vote, this rank votes against the step after all. Then all try again.
        against = vote | {"ok": False, "text": "other groups did not vote in time"}
        with self.progress.waiting():
            answer = self._wait_for("decision", generation=number, if_late=partial(self._send, against))
        return None if answer is None else Decision(tuple(answer["facts"]), newcomers=answer["newcomers"])

    def settle(self, facts: Any, *, step: int, phase: int, fresh: bool) -> Decision:
        """Learn from the others whether the last vote was committed, when the coordinator is back.

        The next :meth:`join` returns the generation in which they meet.

        Args:
            facts: what this rank voted with.
            step: what the coordinator counts for this rank: committed steps, or with local steps
                committed votes.
            phase: what comes next for this rank.
            fresh: whether the rank has no state.

        Raises:
            UnansweredError: the others have not committed the step.
        """
        self._next = self._join(step=step, phase=phase, fresh=fresh, pending=True)
        if not self._next.commit_pending:
            raise UnansweredError("the coordinator was gone")
        return Decision((facts,), newcomers=False)

    def give_up(self, reason: str) -> None:
        """Tell the coordinator that this rank cannot finish its reductions. Then nobody waits."""
        if self._assembly is not None and not self.abort.is_set():
            self.reason = self.reason or reason
            vote = {"type": "vote", "generation": self._assembly.number, "attempt": self._attempt, "ok": False}
            self._send(vote | {"text": reason[:_MOST_SAID]})

    def tell(self, text: str) -> None:
        """Let the coordinator say something to the user."""
        self._send({"type": "tell", "text": text[:_MOST_SAID]})

    def fail(self, reason: str) -> None:
        """Tell the coordinator that the run cannot go on. This ends the run for all groups."""
        self._send({"type": "fail", "text": reason[:_MOST_SAID]})

    def leave(self) -> None:
        """Tell the coordinator that this rank has finished the run."""
        self._send({"type": "bye"})

    def leave_early(self) -> None:
        """Tell the coordinator that this rank's group leaves a run that goes on without it."""
        self._send({"type": "leave"})

    def hang_up(self) -> None:
        """Close the connection without a word, as the kernel does if the process dies."""
        self._wait_seconds = 0.0
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    # -- the connection ----------------------------------------------------------------------------

    def _wait_for(
        self, kind: str, generation: int | None = None, if_late: Callable[[], object] = lambda: None
    ) -> Message | None:
        """Return the next message of this kind, or None if the connection broke.

        While a decision is awaited, an abort ends the wait. ``if_late`` is called if it takes long.
        """
        began, is_late = time.monotonic(), False
        while True:
            if not is_late and (is_late := self.given_up(began)):
                if_late()
            try:
                message = self._answers.get(timeout=None if is_late else _LOOK_SECONDS)
            except queue.Empty:
                continue
            if message is None:
                self._has_read_all = True
                return None
            if message["type"] == "cut":
                raise CutOffError(f"group {self.identity.slot} was cut off ({message.get('reason')}); it starts again")
            if message["type"] == "finished":
                raise RunFinishedError
            if message["type"] == "failed":
                raise PeerLostError(f"the run cannot go on: {message.get('reason')}")
            if generation is not None and message["type"] == "abort" and message["generation"] == generation:
                raise StepAbortedError(message.get("reason", ""))
            if message["type"] == kind and generation in (None, message["generation"]):
                return message

    def _connect(self) -> None:
        """Connect, and try again for as long as ``wait_seconds``."""
        with self.progress.waiting():
            connection, channel = reach(self._address, self._token, self._wait_seconds)
        connection.settimeout(None)
        with self._lock:
            self._socket, self._channel, self._joined, self._is_alone = connection, channel, None, False
            self._is_answered, self._answers, self._has_read_all = False, queue.SimpleQueue(), False
        reading = (connection, channel, self._answers)
        threading.Thread(target=self._read, args=reading, name="elastic", daemon=True).start()

    def _read(self, connection: socket.socket, channel: Channel, answers: queue.SimpleQueue[Message | None]) -> None:
        reason = "the coordinator is gone"
        with contextlib.suppress(OSError, ProtocolError), connection:
            while data := receive(connection, self._heartbeat, lambda: self.beat_seconds, lambda: self._joined):
                for message in channel.feed(data):
                    self._is_answered = True
                    if message["type"] in ("abort", "cut", "failed"):
                        self._note_abort(message)
                    if message["type"] == "cut":
                        reason, self.is_cut_off = self.reason, True
                    if message["type"] != "beat":
                        answers.put(message)
        self._note_abort({"generation": self._generation, "reason": reason})
        self._is_alone = True
        answers.put(None)
        # The main thread connects again, unless it waits for a rank that ended behind a cut link.
        while self._socket is connection and not self.is_cut_off:
            time.sleep(self.beat_seconds)
            if self._is_stuck and is_cut_off(self._address, self._token, self._request | {"type": "ask"}):
                self.is_cut_off = True

    def _note_abort(self, message: Message) -> None:
        with self._lock:
            number = message.get("generation", self._generation)
            self._aborted = max(self._aborted, number)
            if number >= self._generation:
                self.reason = str(message.get("reason", ""))
                self.abort.set()

    def _beat(self) -> None:
        """Send heartbeats regularly, and at once when the main thread begins or ends to hang."""
        told, was_hanging, since = 0.0, False, math.inf
        while True:
            time.sleep(min(_LOOK_SECONDS, self.beat_seconds))
            now, signs = time.monotonic(), self.progress.signs()
            hangs = signs["pause"] is not None
            if now - told >= self.beat_seconds or hangs != was_hanging:
                told, was_hanging = now, hangs
                self._send({"type": "beat", **signs}, only_if_joined=True)
            # A rank of this group that died with its host says nothing to a rank that waits for it.
            self._is_stuck = hangs or self.progress.waits_inside
            is_stuck = self._is_stuck if self.is_cut_off else hangs
            since = min(since, now) if is_stuck and self._is_alone else math.inf
            # Without the coordinator, all groups may be slow, and go on when it is back.
            if now - since > (_HANG_SECONDS if self.is_cut_off else max(_HANG_SECONDS, self._wait_seconds)):
                self._on_hang(f"{self.reason}; the others have gone on without this group")
                since = math.inf
            if signs["idle"] > self._longest_pause:
                self._on_hang(f"no progress for {self._longest_pause:g} s")

    def _send(self, message: Message, *, only_if_joined: bool = False) -> None:
        with self._lock, contextlib.suppress(OSError):  # reading finds the broken connection
            may = self._joined is not None or not only_if_joined
            if may and self._socket is not None and self._channel is not None and self._channel.is_open:
                self._socket.sendall(self._channel.seal(message))
                if message["type"] == "join":
                    self._joined = self._joined or time.monotonic()
