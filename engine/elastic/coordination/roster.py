"""The ranks that are connected to the coordinator, and what they ask for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from .records import Generation, Rank, slots_of

Peer = Hashable


class Roster(dict[Peer, Rank]):
    """The ranks, by connection.

    Args:
        ranks: the number of ranks of a group.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self._ranks = ranks

    def of(self, slots: Iterable[int]) -> dict[Peer, Rank]:
        """Return the ranks of some groups."""
        wanted = set(slots)
        return {peer: rank for peer, rank in self.items() if rank.slot in wanted}

    def add(self, peer: Peer, rank: Rank) -> list[Peer]:
        """Add a rank in place of its earlier connections, and return these."""
        who = (rank.slot, rank.inside)
        earlier = [other for other, known in self.items() if (known.slot, known.inside) == who and other != peer]
        for other in earlier:
            del self[other]
        self[peer] = rank
        return earlier

    def pop_lives(self, lives: Collection[str]) -> list[Peer]:
        """Remove all ranks of these lives of groups, and return their connections."""
        found = [peer for peer, rank in self.items() if rank.life in lives]
        for peer in found:
            del self[peer]
        return found

    def torn(self, left: Collection[Peer], generation: Generation | None) -> set[str]:
        """Return the lives of groups that must connect again, because these connections are gone.

        If a rank of the generation is gone, or if there is none and any rank is, those are all.
        Nobody can have gone on without the coordinator, so all may come back.
        """
        gone = {rank.life for peer, rank in self.items() if peer in left and not rank.is_leaving}
        is_over = generation is None or not gone.isdisjoint(generation.lives.values())
        return {rank.life for rank in self.values()} if gone and is_over else gone

    def hear_all(self, now: float) -> None:
        """Note that all are heard."""
        for rank in self.values():
            rank.heard = now

    def heard(self, life: str) -> float:
        """Return when a rank of this life of a group was heard last."""
        return max(rank.heard for rank in self.values() if rank.life == life)

    def has_joined(self, slot: int) -> bool:
        """Return whether all ranks of a group ask for the next generation."""
        return sum(rank.joining is not None for rank in self.of([slot]).values()) == self._ranks

    def joining(self, slot: int, key: str) -> Any:
        """Return one value of a group's request to join: for ``phase`` and ``step`` the smallest of
        its ranks, for other keys the largest, 0 if there is none.
        """
        ranks = self.of([slot]).values()
        values = (rank.joining.get(key) or 0 for rank in ranks if rank.joining is not None)
        return min(values) if key in ("phase", "step") else max(values, default=0)

    def is_pending(self, slot: int) -> bool:
        """Return whether no rank of a group knows if its last vote was committed."""
        return all(rank.joining is not None and rank.joining.get("pending") for rank in self.of([slot]).values())

    def steps_of(self, slots: Iterable[int]) -> tuple[int, list[int], list[int]]:
        """Return the newest step that one of these groups has committed, the groups behind it, and
        those of them that shall commit their last vote, because the others have.
        """
        steps = {slot: self.joining(slot, "step") for slot in slots}
        newest = max(steps.values(), default=0)
        behind = [slot for slot, step in steps.items() if step < newest]
        return newest, behind, [slot for slot in behind if steps[slot] == newest - 1 and self.is_pending(slot)]

    def stay(self, lives: Mapping[int, str]) -> bool:
        """Return whether a rank of these groups, by slot and life, is here that has not ended the
        run.
        """
        return any(lives.get(rank.slot) == rank.life and not rank.is_leaving for rank in self.values())

    def ready_since(self, slot: int) -> float:
        """Return when the last rank of a group asked for the next generation."""
        return max(rank.asked for rank in self.of([slot]).values())

    def with_state(self, generation: Generation | None, now: float, patience: float) -> list[int] | None:
        """Return the groups with state that go on, or None if some of them have not asked yet.

        Args:
            generation: the present one, or None at a new coordinator, which does not know it.
            now: the present time.
            patience: for how many seconds, from the first request on, a new coordinator waits for
                groups that the others know.
        """
        if generation is not None:
            living = generation.living
            return living if living and all(self.has_joined(slot) for slot in living) else None
        asking = [rank for rank in self.values() if rank.joining is not None and not rank.joining.get("fresh")]
        slots = sorted({rank.slot for rank in asking})
        expected = {slot for rank in asking for slot in slots_of(rank.joining)}
        late = now - min((rank.asked for rank in asking), default=now) > patience
        complete = all(self.has_joined(slot) for slot in slots)
        return slots if complete and (late or all(self.has_joined(slot) for slot in expected)) else None

    def complete_fresh(self, members: Collection[int]) -> list[int]:
        """Return the complete groups that wait and have no state, except ``members``."""
        asking = (rank for rank in self.values() if rank.joining is not None and rank.joining.get("fresh"))
        return sorted({rank.slot for rank in asking if rank.slot not in members and self.has_joined(rank.slot)})
