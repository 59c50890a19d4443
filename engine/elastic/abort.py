"""Whether a generation is over, and how long a rank waits for other groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .coordination.errors import StepAbortedError

_LOOK_SECONDS = 0.0003
_LONGEST_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class WaitLimits:
    """How many seconds a rank waits for other groups.

    Attributes:
        connection: until all are connected in a meeting.
        given_up: returns whether a wait that began at this time of the monotonic clock takes too
            long for what the rank does now. If so, all groups meet and try again.
        operation: gloo's own limit. An operation that was left behind is dropped after it.
    """

    connection: float
    given_up: Callable[[float], bool]
    operation: float


class Abort:
    """Whether a generation is over.

    Args:
        is_set: whether the coordinator said so.
        tell: called with a reason if this rank notices first.
        note: called when this rank begins an operation, or a wait for one.
        look: called again and again while this rank waits.
        given_up: see :class:`WaitLimits`.

    Attributes:
        failed: why an operation of this rank failed, or "".
    """

    def __init__(
        self,
        is_set: Callable[[], bool],
        tell: Callable[[str], None],
        note: Callable[[], None] = lambda: None,
        look: Callable[[], None] = lambda: None,
        given_up: Callable[[float], bool] = lambda _: False,
    ):
        self._is_set, self._tell, self.note, self._look, self._given_up = is_set, tell, note, look, given_up
        self._defers = False
        self.failed = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing of this generation will be finished."""
        return bool(self.failed) or self._is_set()

    def fail(self, error: BaseException) -> None:
        """Note that an operation failed, which means that another rank is gone."""
        if not self.failed:
            self.failed = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            self._tell(self.failed)

    def check(self) -> None:
        """Raise StepAbortedError if the generation is over, unless errors are deferred now."""
        if self.is_over and not self._defers:
            raise StepAbortedError(self.failed or "a group is lost")

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which operations of a generation that is over end without an error.

        Their results are worthless. The caller must look at :attr:`is_over` afterwards.
        """
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Return when ``is_done``.

        Raises StepAbortedError if the generation is over before, or if this takes too long.
        """
        pause, began = _LOOK_SECONDS, time.monotonic()
        while not is_done():
            if not self.is_over and self._given_up(began):
                self.fail(TimeoutError(f"no answer from other groups after {time.monotonic() - began:.0f} s"))
            if self.is_over:
                raise StepAbortedError(self.failed or "a group is lost")
            self._look()
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_SECONDS, pause * 1.2)
        self.note()
