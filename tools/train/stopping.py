"""Whether an elastic run stops, or a group leaves it, when ranks receive signals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# A group that is told to stop waits so long for the others to be told, too, before it leaves.
LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class Told:
    """What a rank tells of signals with its vote.

    Attributes:
        signal: the signal that it has received, 0 if none.
        leaves: whether it has waited long enough for the others to be told.
    """

    signal: int
    leaves: bool


@dataclass(frozen=True)
class Outcome:
    """What happens after a step.

    Attributes:
        signal: the signal for which all groups stop, 0 if they go on.
        leaving: the groups that leave, while the others go on.
    """

    signal: int = 0
    leaving: frozenset[int] = frozenset()


def decide(
    told: Sequence[Told], groups: Sequence[int], ranks: int, can_go_on: Callable[[Collection[int]], bool]
) -> Outcome:
    """Decide what happens after a step. All ranks find the same.

    All groups stop if all are told to. If only some are told, they leave. A cluster tells one group
    when it takes that group's node away. If the others cannot go on without them, all stop.

    Args:
        told: what the ranks told, in order of group and rank. Not that of all ranks if the
            coordinator was gone. The decision then waits for the next step.
        groups: the living groups.
        ranks: the ranks of each group.
        can_go_on: whether the run can go on with these groups.
    """
    if len(told) != len(groups) * ranks:
        return Outcome()
    parts = {group: told[index * ranks : (index + 1) * ranks] for index, group in enumerate(groups)}
    signals = {group: max(each.signal for each in part) for group, part in parts.items()}
    if all(signals.values()):
        return Outcome(max(signals.values()))
    leaving = {group for group, part in parts.items() if any(each.leaves for each in part)}
    staying = set(groups) - leaving
    if leaving and not can_go_on(staying):
        return Outcome(max(signals.values()))
    return Outcome(leaving=frozenset(leaving))
