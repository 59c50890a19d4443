"""A group's processes, and how often and how soon it is started again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .rank_process import RankProcess

_BACK_OFF_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # before the first, second, … restart in a window


class RestartBudget:
    """The restarts of one group: at most ``most`` in ``window`` seconds.

    Attributes:
        used: the restarts in the present window.
    """

    def __init__(self, most: int, window: float):
        self._most, self._window = most, window
        self._times = deque[float]()

    @property
    def used(self) -> int:
        return len(self._times)

    def take(self, now: float) -> float | None:
        """Take a restart at the time ``now``, and return how many seconds to wait before it.

        None if there is no restart left in this window.
        """
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        wait = _BACK_OFF_SECONDS[min(len(self._times), len(_BACK_OFF_SECONDS) - 1)]
        self._times.append(now)
        return wait


@dataclass
class Group:
    """A group of an elastic run, which this host starts.

    Attributes:
        slot: its number.
        restarts: its restarts.
        life: the name of its last start.
        ranks: its processes, while they run.
        due: when to start it, None for never.
        exit_code: its exit code, once it will not be started again.
    """

    slot: int
    restarts: RestartBudget
    life: str = ""
    ranks: list[RankProcess] = field(default_factory=list)
    due: float | None = 0.0
    exit_code: int | None = None
