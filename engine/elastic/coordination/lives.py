"""Which starts of groups are cut off, and which of them may come back with their state."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_MOST_TRIES = 10  # how often all groups may fall silent without a committed step in between


class Lives:
    """The lives (starts of groups) that the coordinator has lost.

    When no group is heard any longer, nobody can have gone on without the others. So all of them
    may come back, until some of them have begun a new generation.
    """

    def __init__(self) -> None:
        self._lost, self._awaited, self._met = set[str](), set[str](), set[str]()
        self._step, self._tries = -1, 0

    def lose(self, life: str) -> None:
        """Note that a group is lost."""
        self._lost.add(life)

    def is_cut(self, life: str) -> bool:
        """Whether a group may not come back, because others may have gone on without it."""
        return life in self._lost and not self.is_awaited(life)

    def is_awaited(self, life: str) -> bool:
        """Whether a lost group may come back with its state."""
        return life in self._awaited

    def expect(self, lives: Collection[str], step: int) -> bool:
        """Let the groups of a generation come back after all fell silent.

        Args:
            lives: the groups.
            step: the number of committed steps.

        Returns:
            False if this has been tried too often at this step.
        """
        self._tries = self._tries + 1 if step == self._step else 1
        self._step = step
        self._awaited = set(lives)
        self._lost |= self._awaited
        return self._tries <= _MOST_TRIES

    def begin(self, lives: Iterable[str]) -> None:
        """Begin a generation with these groups. The others go on being lost."""
        self._met.update(lives)
        self._lost, self._awaited = self._lost.difference(lives), set()

    def has_met(self, life: str) -> bool:
        """Whether a group has ever been in a generation."""
        return life in self._met
