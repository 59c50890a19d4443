"""What the coordinator knows of ranks, of the present generation and of losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import Message


@dataclass
class Rank:
    """A connected rank. ``joining``: its last request to join, until it is answered."""

    slot: int
    inside: int
    life: str
    host: str
    store: str
    heard: float
    joining: Message | None = None
    is_leaving: bool = False


@dataclass
class Generation:
    """The groups that reduce together now.

    Attributes:
        lives: slot → the life (start) of its group.
        since: slot → the generation in which the group joined.
        votes: the ranks that voted in this attempt, with what they said.
        attempt: the number of the attempt within the generation.
        is_over: whether no further attempt can be committed.
        doubt: when a group that had voted died, before the others had.
    """

    number: int
    lives: dict[int, str]
    since: dict[int, int]
    votes: dict[tuple[int, int], Message] = field(default_factory=dict)
    attempt: int = 0
    is_over: bool = False
    doubt: float | None = None
    lost: set[int] = field(default_factory=set)


@dataclass
class Loss:
    """A loss that is not reported yet, because the others have not gone on."""

    slot: int
    host: str
    cause: str
    at: float
    step: int
