"""How often, and how soon, a lost group is started again."""

from __future__ import annotations

from collections import deque

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
