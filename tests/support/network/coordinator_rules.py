"""The coordinator's rules, without its sockets and with a clock of the test."""

from __future__ import annotations

from typing import Any

from sdp.engine.elastic.coordination.membership import Membership
from sdp.engine.elastic.coordination.records import STEP

HEARTBEAT, WAIT, LAST_CALL = 5.0, 30.0, 10.0


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rules:
    """The rules for three groups. ``sent`` has the answers, by rank, and ``said`` the lines."""

    def __init__(self, ranks: int = 1, min_groups: int | None = None) -> None:
        self._ranks = ranks
        self.now = 0.0
        self.sent: list[tuple[str, str, list[int]]] = []
        self.said: list[str] = []
        self.membership = Membership(
            3,
            ranks,
            send=self._send,
            close=lambda _: None,
            say=self.said.append,
            heartbeat_seconds=HEARTBEAT,
            wait_seconds=WAIT,
            min_groups=min_groups,
            last_call_seconds=LAST_CALL,
            clock=lambda: self.now,
        )

    def _send(self, peer: Any, message: Any) -> None:
        self.sent.append((peer, message["type"], [member["slot"] for member in message.get("members", ())]))

    def join(
        self,
        peer: str,
        slot: int,
        *,
        step: int = 0,
        fresh: bool = False,
        members: tuple[int, ...] = (),
        inside: int = 0,
        life: str = "",
        begun: bool = False,
        kind: str = "join",
        phase: int = STEP,
    ) -> None:
        """Let a rank ask for the next generation, or ``ask`` whether the others go on without it.

        ``life``: its process. ``begun``: whether it sees that the run has begun before.
        """
        who = {"slot": slot, "inside": inside, "ranks": self._ranks, "life": life or peer, "host": "here", "store": ""}
        what = {"step": step, "phase": phase, "fresh": fresh, "pending": False, "members": [*members], "begun": begun}
        self.membership.hear(peer, {"type": kind, **who, **what})

    def begin(self) -> None:
        """Let the run begin with ranks a, b and c."""
        for slot, peer in enumerate("abc"):
            self.join(peer, slot, fresh=True)

    def come_back(self, peers: str, step: int = 1, members: tuple[int, ...] = (0, 1, 2)) -> None:
        """Let some of the ranks a, b and c join with their state."""
        for peer in peers:
            self.join(peer, "abc".index(peer), step=step, members=members)

    def vote(self) -> None:
        """Let all commit the first step."""
        assert self.membership.generation is not None
        number = self.membership.generation.number
        for peer in "abc":
            self.membership.hear(peer, {"type": "vote", "generation": number, "attempt": 0, "ok": True, "facts": None})

    def wait(self, seconds: int, *peers: str) -> None:
        """Let time pass, in which these ranks show that they live."""
        for _ in range(seconds):
            self.now += 1
            for peer in peers:
                self.membership.hear(peer, {"type": "beat"})
            self.membership.tick()

    def generations(self) -> list[list[int]]:
        """Return the groups of each generation that was told, once."""
        found = [slots for _, kind, slots in self.sent if kind == "generation"]
        return [slots for index, slots in enumerate(found) if slots not in found[:index]]
