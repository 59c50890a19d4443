"""Whether a rank's main thread makes progress, and which rank is cut off if one does not.

A rank whose main thread hangs still sends heartbeats, from another thread. So each part of a step,
and an evaluation, has a limit: ``heartbeat_seconds``, and the longest pause that it has had so far.
A rank that waits for other groups looks at its messages in turn, which counts as progress.

A rank that waits inside its group cannot look. If another group hangs, such a rank may seem to
hang, too. So the coordinator cuts off only the group with the longest pause, and then gives the
others time to go on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from .messages import ProtocolError

_GATHERING_SECONDS = 0.25  # from the first report of a pause until a group is cut off
_LONGEST_PAUSE = 1e9  # seconds


class Progress:
    """The main thread's signs of progress. Another thread asks for its pauses.

    Args:
        heartbeat_seconds: see ``sdp.elastic``.
        judged: the parts of a step, an evaluation and an average. Other parts have limits of their
            own, and are not judged here.
        clock: measures seconds.
    """

    def __init__(
        self, heartbeat_seconds: float, judged: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ):
        self._heartbeat, self._judged, self._clock = heartbeat_seconds, frozenset(judged), clock
        self._part = ""
        self._runs = Counter[str]()  # of each part, that have ended
        self._longest: dict[str, float] = {}  # pause of each part, without its first run
        self._present = 0.0  # the longest pause of the present part
        self._last, self._waits = clock(), False

    def begin(self, part: str) -> None:
        """Note that the main thread begins a part of a step, or something else."""
        self.note()
        if self._runs[self._part]:  # the first run also compiles, allocates and connects
            self._longest[self._part] = max(self._present, self._longest.get(self._part, 0.0))
        self._runs[self._part] += 1
        self._part, self._present = part, 0.0

    def note(self) -> None:
        """Note that the main thread makes progress."""
        now = self._clock()
        self._present = max(self._present, now - self._last)
        self._last = now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the main thread waits for the coordinator."""
        self.note()
        self._waits = True
        try:
            yield
        finally:
            self._last, self._waits = self._clock(), False

    def pause(self) -> float | None:
        """Return the seconds since the last sign of progress, or None if they are within the limit.

        A part has no limit here until it has run twice.
        """
        part, pause = self._part, self._clock() - self._last
        if self._waits or part not in self._judged or part not in self._longest:
            return None
        return pause if pause > self._heartbeat + self._longest[part] else None


class PausedRanks:
    """What the coordinator knows of ranks that make no progress.

    Args:
        heartbeat_seconds: after a group was cut off, the others have so long to go on.
    """

    def __init__(self, heartbeat_seconds: float):
        self._heartbeat = heartbeat_seconds
        self._since: dict[Hashable, float] = {}
        self._first = self._blind_until = -math.inf

    def hear(self, peer: Hashable, pause: Any, now: float) -> None:
        """Process what a rank reported with its heartbeat.

        Args:
            peer: the rank.
            pause: the seconds without progress. None: it makes progress.
            now: the time.

        Raises:
            ProtocolError: ``pause`` is not a number of seconds.
        """
        if pause is None:
            self._since.pop(peer, None)
            return
        if type(pause) not in (int, float) or not 0 <= pause <= _LONGEST_PAUSE:
            raise ProtocolError("a heartbeat with a wrong pause")
        if now >= self._blind_until:
            if not self._since:
                self._first = now
            self._since[peer] = now - pause

    def forget(self, peer: Hashable) -> None:
        """Forget a rank that is gone."""
        self._since.pop(peer, None)

    def worst(self, now: float) -> tuple[Hashable, float] | None:
        """Return the rank that is to be cut off now, and its pause in seconds, or None."""
        if not self._since or now - self._first < _GATHERING_SECONDS:
            return None
        peer = min(self._since, key=lambda each: self._since[each])
        pause = now - self._since[peer]
        self._since.clear()
        self._blind_until = now + self._heartbeat
        return peer, pause
