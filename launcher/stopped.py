"""Finds ranks that are stopped (SIGSTOP, a debugger) while a run is told to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .rank_process import RankProcess

# A rank that is stopped writes no checkpoint, and the others wait for it.
STOPPED_SECONDS = 15.0
_LOOK_SECONDS = 1.0


class StoppedRanks:
    """Looks once a second whether a rank is stopped.

    Args:
        ranks: the processes to look at. A stopped one may keep all others from ending.
        clock: the time in seconds.
    """

    def __init__(self, ranks: Sequence[RankProcess], clock: Callable[[], float] = time.monotonic):
        self._ranks, self._clock = ranks, clock
        self._looked = self._runs = clock()

    def for_too_long(self) -> RankProcess | None:
        """Return a stopped rank, if one was found at every look and has to be killed now."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        stopped = next((rank for rank in self._ranks if rank.is_stopped()), None)
        if stopped is None:
            self._runs = now
        # The next look would be later than the promised time.
        return stopped if now - self._runs > STOPPED_SECONDS - _LOOK_SECONDS else None


def describe(stopped: RankProcess) -> str:
    """Say which rank is stopped, and where it was."""
    return f"{stopped.whereabouts or f'rank {stopped.rank}'}, is stopped"
