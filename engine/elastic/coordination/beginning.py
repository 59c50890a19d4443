"""When a run begins: with all groups, or after a last call with enough of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .roster import Roster


class Beginning:
    """Decides whether the groups that have come may begin the run.

    With fewer groups than all, they begin only if none of them sees that the run has begun before.
    A coordinator that was started again does not know of the groups that are training. Without this
    rule it could begin a second run with groups that return.

    Args:
        groups: the number of groups of the run.
        least: how many groups are enough.
        last_call_seconds: how long to wait for further groups when enough have come.
    """

    def __init__(self, groups: int, least: int, last_call_seconds: float):
        self._groups, self._least, self._last_call = groups, least, last_call_seconds

    def needed(self, peers: Roster, here: Sequence[int]) -> int:
        """Return how many groups the run needs to begin, if the groups ``here`` have come."""
        return self._groups if any(peers.joining(slot, "begun") for slot in here) else self._least

    def is_hopeless(self, peers: Roster, here: Sequence[int], gone: Collection[int]) -> bool:
        """Whether too few groups can come, because those in ``gone`` will not."""
        return len(here) + len(self._coming(here, gone)) < self.needed(peers, here)

    def may_begin(self, peers: Roster, here: Sequence[int], gone: Collection[int], now: float) -> bool:
        """Whether the groups ``here`` may begin at the time ``now``."""
        needed = self.needed(peers, here)
        if len(here) < needed:
            return False
        enough_since = sorted(peers.ready_since(slot) for slot in here)[needed - 1]
        return not self._coming(here, gone) or now - enough_since > self._last_call

    def what_is_missing(self, peers: Roster, here: Sequence[int] | None, seconds: float) -> str | None:
        """Return which groups have not come, in words, or None if enough have.

        Args:
            peers: the ranks.
            here: the groups that have come, or None if groups with state are awaited.
            seconds: how long they were awaited.
        """
        needed = self._groups if here is None else self.needed(peers, here)
        if here is not None and len(here) >= needed:
            return None
        came = "not all groups came"
        if here is not None and needed < self._groups:
            came = f"only {len(here)} of at least {needed} groups came"
        why = " (all are needed, because the directory has .begun or other files of a run that has begun)"
        absent = ", ".join(str(slot) for slot in range(self._groups) if not peers.has_joined(slot))
        reason = why * (here is not None and self._least < needed == self._groups)
        return f"{came} within {seconds:g} s{reason}; missing: {absent}"

    def _coming(self, here: Sequence[int], gone: Collection[int]) -> set[int]:
        """Return the groups that may still come."""
        return set(range(self._groups)) - {*here, *gone}
