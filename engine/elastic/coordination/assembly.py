"""What a rank knows of itself, of a generation and of a committed step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """Who a rank is.

    Attributes:
        slot: the number of its SDP group.
        inside: its rank in the group.
        ranks: the number of ranks of the group.
        life: a name of this start of the group, the same on all of its ranks.
        host: the name of its host.
        store: HOST:PORT of the group's store, where other groups may meet.
        listen: the address at which the ranks of other groups reach this rank, None for that of
            GLOO_SOCKET_IFNAME.
    """

    slot: int
    inside: int
    ranks: int
    life: str
    host: str
    store: str
    listen: str | None = None


@dataclass(frozen=True)
class Member:
    """A group of a generation. ``fresh``: it has no state yet."""

    slot: int
    fresh: bool
    host: str
    store: str


@dataclass(frozen=True)
class Assembly:
    """A generation as its members see it.

    Attributes:
        number: the number of the generation.
        name: a name that no other generation of any run has.
        members: its groups, by slot.
        phase: what the groups do next.
        step: the number of committed steps.
        writer: the slot of the group that writes the run's files.
        commit_pending: whether the step that this rank had voted for is committed.
        expected: the slots of groups that are not members but may still join.
    """

    number: int
    name: str
    members: tuple[Member, ...]
    phase: int
    step: int
    writer: int
    commit_pending: bool
    expected: tuple[int, ...] = ()

    @property
    def slots(self) -> list[int]:
        """The slots of the groups."""
        return [member.slot for member in self.members]

    @property
    def fresh(self) -> list[int]:
        """The groups without state, by their numbers among the members."""
        return [index for index, member in enumerate(self.members) if member.fresh]

    @property
    def is_start(self) -> bool:
        """Whether no group has state, because the run begins."""
        return all(member.fresh for member in self.members)


def join_request(
    identity: Identity, known: Assembly | None, *, step: int, phase: int, fresh: bool, pending: bool
) -> dict[str, Any]:
    """Return a request to join the next generation.

    Args:
        identity: who asks.
        known: the generation that this rank knows.
        step: the number of steps that it has committed.
        phase: what comes next for it.
        fresh: whether it has no state.
        pending: whether it does not know if its last vote was committed.
    """
    return {
        "type": "join", "slot": identity.slot, "inside": identity.inside, "ranks": identity.ranks,
        "life": identity.life, "host": identity.host[:256], "store": identity.store, "step": step, "phase": phase,
        "fresh": fresh, "pending": pending, "generation": known.number if known is not None else 0,
        "members": known.slots if known is not None else [],
    }  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """A committed step. ``facts``: what the ranks sent with their votes, in order of slot and rank.

    ``newcomers``: groups wait to join, so a new generation is due before the next step.
    """

    facts: tuple[Any, ...]
    newcomers: bool
