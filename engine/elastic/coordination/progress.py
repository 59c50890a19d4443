"""Whether a rank's main thread makes progress, and which rank is cut off if one does not.

A rank whose main thread hangs still sends heartbeats, from another thread. Two rules find it.

The rule of idleness: a rank hangs if its main thread made no progress and its process was idle for
``heartbeat_seconds``, so it has used neither the CPU nor files. A rank that waits for other groups
looks for its messages again and again, which counts as progress. But an idle rank may wait inside
its group for one that computes or waits for another group, or on its host for a lock of a compiler.
So it is cut off only if no other rank is at work: each is idle, too, or is known to wait.

The rule of longer pauses also finds a main thread that hangs while it uses the CPU. Each part of a
step, an evaluation, a checkpoint and a meeting have a limit: ``heartbeat_seconds``, and the longest
pause that the part has had so far. The time of a checkpoint or a meeting varies more, so four times
its longest pause counts, and a wait for a file does not. The first runs of a part may take much
longer, because they compile and allocate, and have no such limit.

A rank that waits inside its group cannot look. If another group hangs, such a rank may seem to
hang, too. So the coordinator cuts off only the group with the longest pause. When a group is lost,
for whatever cause, it gives the others time to go on. It does not cut off a group

- of which another rank has paused for longer, within a higher limit: the others wait for that one,
- if no rank of another group makes progress: a pause of all has a cause that they share, such as a
  file system, and ends without a loss when that is over.

When a group has done something together, all its ranks meet, which takes no time. If all of them
wait there for ``heartbeat_seconds``, they cannot reach each other, and the group is cut off.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from .messages import ProtocolError

_GATHERING_SECONDS = 0.25  # from the report of a pause until a group is cut off for it
SIGNS = frozenset({"pause", "idle", "is_inactive", "waits", "inside"})  # what a heartbeat tells of the main thread
_LONGEST_PAUSE = 1e9  # seconds
_VARIED_FACTOR = 4.0  # disks and the sizes of messages differ from one time to the next


class Progress:
    """The main thread's signs of progress. Another thread asks for its pauses.

    Args:
        heartbeat_seconds: see ``sdp.elastic``.
        steady: parts that take about the same time in each run. Their first run does not count,
            because it also compiles, allocates and connects, and has no limit here.
        varied: parts whose time varies, and how many seconds their first run may pause.
        clock: measures seconds.
        busy: parts in which a rank hangs if its process is idle.
        quiet_process: returns for how many seconds this process was idle, and for how many it used
            no file, see ``ProcessActivity``.
        is_sending: returns whether the process sends much.

    The limit of a part in ``varied`` never exceeds that of its first run.
    Parts that are neither ``steady`` nor ``varied`` have no limit here.

    """

    def __init__(
        self,
        heartbeat_seconds: float,
        steady: Collection[str] = (),
        varied: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        *,
        busy: Collection[str] = (),
        quiet_process: Callable[[], tuple[float, float]] = lambda: (0.0, math.inf),
        is_sending: Callable[[], bool] = lambda: False,
    ):
        self._heartbeat, self._steady, self._varied, self._clock = heartbeat_seconds, frozenset(steady), varied, clock
        self._busy, self._quiet_process, self._is_sending = frozenset(busy), quiet_process, is_sending
        self._part = ""
        self._runs = Counter[str]()  # of each part
        self._longest: dict[str, float] = {}  # pause of each part, in the runs that count
        self._present = 0.0  # the longest pause of the present part
        self._last, self._waits = clock(), False
        self._inside_since: float | None = None  # of a wait for the other ranks of this group
        self._waits_since: float | None = None  # also of waits in which it looks again and again

    def begin(self, part: str) -> None:
        """Note that the main thread begins a part of a step, or something else."""
        self._end()
        self._part, self._present = part, 0.0

    def _end(self) -> None:
        """Note that the present part ends."""
        self.note()
        if self._runs[self._part] or self._part in self._varied:
            self._longest[self._part] = max(self._present, self._longest.get(self._part, 0.0))
        self._runs[self._part] += 1

    def note(self) -> None:
        """Note that the main thread makes progress."""
        self._note()
        self._waits_since = None

    def look(self) -> None:
        """Note that the main thread waits for other groups, and looks again and again."""
        self._note()
        self._waits_since = self._last if self._waits_since is None else self._waits_since

    def _note(self) -> None:
        now = self._clock()
        self._present = max(self._present, now - self._last)
        self._last = now

    @contextmanager
    def waiting(self, *, inside: bool = False) -> Iterator[None]:
        """A context in which the main thread waits for the coordinator, or ``inside`` its group for
        ranks that have limits of their own.
        """
        self.look()
        self._waits, self._inside_since = True, self._last if inside else None
        try:
            yield
        finally:
            self._last, self._waits, self._inside_since = self._clock(), False, None
            self._waits_since = None

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """A context in which the main thread does a part inside another one."""
        self.note()
        outer = self._part, self._present
        self._part, self._present = part, 0.0
        try:
            yield
        finally:
            self._end()
            self._part, self._present = outer

    @property
    def idle(self) -> float:
        """The seconds since the last sign of progress. 0 in a wait."""
        # The main thread may end a wait or note progress between these reads.
        return 0.0 if self._waits else max(0.0, self._clock() - self._last)

    @property
    def waits_inside(self) -> bool:
        """Whether the main thread waits for other ranks of its group."""
        return self._inside_since is not None

    def signs(self) -> dict[str, Any]:
        """Return what a rank reports with its heartbeat, see :meth:`PausedRanks.hear`."""
        part, idle, quiet = self._part, self.idle, (0.0, math.inf)
        if part in self._busy:
            quiet = self._quiet_process()
        found = {
            "pause": idle if self._is_over_limit(part, idle, quiet[1]) else None,
            "idle": idle,
            "is_inactive": False,
        }
        since = self._waits_since if idle < self._heartbeat / 10 else None
        has_waited = since is not None and self._clock() - since >= self._heartbeat / 10
        found["waits"] = has_waited and not self._is_sending()
        inside = self._inside_since
        found["inside"] = None if inside is None else max(0.0, self._clock() - inside)
        if found["pause"] is None and (slept := min(idle, quiet[0])) > self._heartbeat:
            found |= {"pause": slept, "is_inactive": True}
        return found

    def _is_over_limit(self, part: str, idle: float, without_files: float) -> bool:
        """Return whether ``part`` has paused for too long, whatever its process does."""
        longest = self._longest.get(part)
        if part in self._varied:
            is_long = longest is not None and min(idle, without_files) > self._heartbeat + _VARIED_FACTOR * longest
            return is_long or idle > self._varied[part]
        return part in self._steady and longest is not None and idle > self._heartbeat + longest


class PausedRanks:
    """What the coordinator knows of ranks that make no progress.

    Args:
        heartbeat_seconds: after a group was lost, the others have so long to go on.
    """

    def __init__(self, heartbeat_seconds: float):
        self._heartbeat = heartbeat_seconds
        self._heard: dict[Hashable, float] = {}  # when each rank last sent a heartbeat
        self._since: dict[Hashable, float] = {}  # of ranks whose pause is over the limit
        self._told: dict[Hashable, float] = {}  # when those first told of it
        self._active: dict[Hashable, float] = {}  # when each rank last made progress
        self._inactive = set[Hashable]()  # those of self._since that count because their process is idle
        self._inside: dict[Hashable, float] = {}  # since when ranks wait for the others of their group
        self._worked: dict[Hashable, float] = {}  # when each rank was last at work; infinite: it still is
        self._blind_until = -math.inf
        self._living = set[Any]()  # groups, when worst() was called last

    def hear(
        self,
        peer: Hashable,
        now: float,
        pause: Any = None,
        idle: Any = 0.0,
        is_inactive: Any = False,
        waits: Any = False,
        inside: Any = None,
    ) -> None:
        """Process what a rank reported with its heartbeat.

        Args:
            peer: the rank.
            now: the time.
            pause: the seconds without progress, if they are over the rank's limit, else None.
            idle: the seconds without progress in any case.
            is_inactive: whether the pause is over the limit only because its process was idle.
            waits: whether it has been in one wait for other ranks for a while.
            inside: for how many seconds it has waited for the other ranks of its group, if all of
                them only have to meet, else None.

        Raises:
            ProtocolError: one of them is not what it should be.
        """
        given = [idle, *(each for each in (pause, inside) if each is not None)]
        is_wrong = any(type(each) not in (int, float) or not 0 <= each <= _LONGEST_PAUSE for each in given)
        if is_wrong or type(is_inactive) is not bool or type(waits) is not bool:
            raise ProtocolError("a heartbeat with a wrong pause")
        self._heard[peer], self._active[peer] = now, now - idle
        self._inside.pop(peer, None)
        if inside is not None and now >= self._blind_until:
            self._inside[peer] = now - inside
        if pause is None:
            self._since.pop(peer, None)
            self._told.pop(peer, None)
            if not waits:
                self._worked[peer] = math.inf
            elif self._worked.get(peer) == math.inf:
                self._worked[peer] = now
            return
        self._worked.pop(peer, None)
        if now >= self._blind_until:
            self._told.setdefault(peer, now)
            self._since[peer] = now - pause
            (self._inactive.add if is_inactive else self._inactive.discard)(peer)

    def forget(self, peer: Hashable) -> None:
        """Forget a rank that is gone."""
        for each in (self._heard, self._since, self._told, self._active, self._inside, self._worked):
            each.pop(peer, None)
        self._inactive.discard(peer)

    def worst(self, now: float, groups: Mapping[Any, int]) -> tuple[Hashable, float] | None:
        """Return the rank that is to be cut off now, and its pause in seconds, or None.

        Args:
            now: the time.
            groups: the ranks of the living groups, each with the number of its group.
        """
        living, before = {*groups.values()}, self._living
        self._living = living
        if before - living:
            self._give_time(now)
        found = (
            each for each in sorted(self._since, key=self._since.__getitem__) if self._is_guilty(each, now, groups)
        )
        guilty = None
        if (first := next(found, None)) is None:
            guilty = self._divided(now, groups)
        elif now - self._told[first] >= _GATHERING_SECONDS:
            guilty = first, now - self._since[first]
        if guilty is not None:
            self._give_time(now)
        return guilty

    def _give_time(self, now: float) -> None:
        """Let the living groups go on, which may have waited for the one that is lost."""
        self._since.clear()
        self._told.clear()
        self._inside.clear()
        self._blind_until = now + self._heartbeat

    def _divided(self, now: float, groups: Mapping[Any, int]) -> tuple[Hashable, float] | None:
        """Return a rank of a group of which all ranks wait for each other, and for how long.

        A message does not arrive, as after the loss of the link between two of its hosts.
        """
        for group in sorted({*groups.values()}) if self._inside else ():
            own = [each for each, number in groups.items() if number == group]
            waited = now - max(self._inside.get(each, now) for each in own)
            if waited > self._heartbeat and self._others_go_on(own, now, groups):
                return own[0], waited
        return None

    def _is_guilty(self, peer: Hashable, now: float, groups: Mapping[Any, int]) -> bool:
        """Return whether others wait for this rank, and it waits for none of its group."""
        own = {each for each, group in groups.items() if group == groups.get(peer)}
        if peer in self._inactive and any(self._is_at_work(each, now) for each in groups):
            return False
        if any(self._active.get(each, now) < self._since[peer] for each in own - self._since.keys()):
            return False
        return self._others_go_on(own, now, groups)

    def _is_at_work(self, peer: Hashable, now: float) -> bool:
        """Return whether a rank may be at work, as far as is known."""
        if peer in self._since:
            return False
        # One that has just worked may have given the work to another one that has not told it yet.
        recently = now - self._heartbeat / 2
        return self._worked.get(peer, -math.inf) > recently or self._heard.get(peer, now) < recently

    def _others_go_on(self, own: Collection[Hashable], now: float, groups: Mapping[Any, int]) -> bool:
        """Return whether a rank of another group than that of the ranks ``own`` makes progress."""
        others = (self._active.get(each, -math.inf) for each in groups.keys() - {*own})
        return now - max(others, default=-math.inf) <= self._heartbeat / 2
