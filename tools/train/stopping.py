"""Decides whether an elastic run stops, or a group leaves it, when ranks receive signals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# How long a group waits after a signal. If the other groups get a signal too, all stop together.
# Otherwise the group leaves.
LEAVE_SECONDS = 5.0


class LeavesError(Exception):
    """This group leaves the run, which goes on."""


@dataclass(frozen=True)
class Told:
    """What a rank reports about signals with its vote.

    Attributes:
        signal: the signal that it has received, 0 if none.
        leaves: whether ``LEAVE_SECONDS`` have passed since its first signal.
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
    """Decide what happens after a step. All ranks come to the same decision.

    All groups stop if all have received a signal. If only some have, these leave: a cluster signals
    one group when it takes that group's node away. If the others cannot go on without them, all
    stop.

    Args:
        told: the reports of the ranks, in order of group and rank. If the coordinator was gone,
            some are missing. The decision then waits for the next step.
        groups: the living groups.
        ranks: the number of ranks of each group.
        can_go_on: returns whether the run can go on with only these groups.
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
