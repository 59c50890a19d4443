"""What the coordinator knows of ranks, of the present generation and of losses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...environment.elastic import split_address
from .messages import Message, ProtocolError

_MOST_TEXT, _MOST_SAID = 256, 1000

START_AGAIN = "start the run again with --resume"

# Phases, see Generation.phase. Others are those of the training loop, below these.
STEP = 99  # before a step, the only one in which a group may join
GIVE_UP = STEP - 1  # the groups end the run, because no living one holds some units


@dataclass
class Rank:
    """A connected rank.

    Attributes:
        joining: its last request to join, until it is answered.
        asked: when it asked.
    """

    slot: int
    inside: int
    life: str
    host: str
    store: str
    heard: float
    joining: Message | None = None
    asked: float = 0.0
    is_leaving: bool = False

    @classmethod
    def of(cls, message: Message, groups: int, ranks: int, now: float) -> Rank:
        """Return the rank that a request to join describes.

        Raises:
            ProtocolError: a value is missing, or is not one of this run, which has so many
                ``groups`` of so many ``ranks``.
        """
        slot, inside = message.get("slot"), message.get("inside")
        texts = [message.get(key) for key in ("life", "host", "store")]
        numbers = [slot, inside, *(message.get(key) for key in ("step", "phase")), message.get("generation", 0)]
        if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            raise ProtocolError("a join with wrong numbers")
        if not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts):
            raise ProtocolError("a join with wrong texts")
        if not all(type(message.get(key, False)) is bool for key in ("fresh", "pending", "begun")):
            raise ProtocolError("a join with wrong switches")
        if texts[2] and split_address(str(texts[2])) is None:
            raise ProtocolError("a join with a store that is not HOST:PORT")
        assert isinstance(slot, int) and isinstance(inside, int)
        if slot >= groups or inside >= ranks or message.get("ranks") != ranks:
            raise ProtocolError(f"rank {inside} of group {slot}, which this run does not have")
        life, host, store = map(str, texts)
        return cls(slot, inside, life, host, store, now, message, now)

    def as_member(self, *, is_fresh: bool) -> Message:
        """Return what others are told of the group that this rank leads."""
        return {"slot": self.slot, "fresh": is_fresh, "host": self.host, "store": self.store}


@dataclass
class Generation:
    """The groups that reduce together now.

    Attributes:
        lives: slot → the life (start) of its group.
        since: slot → the generation in which the group joined.
        phase: what came next when it began.
        votes: the ranks that voted in this attempt, with what they said.
        attempt: the number of the attempt within the generation.
        is_over: whether no further attempt can be committed.
        doubt: when a group that had voted died, before the others had.
        lost: the groups that are gone.
        silent: the lives of groups that may come back if all fall silent: no rank of them was heard
            any longer, or the coordinator's process was stopped.
        ended: the groups of which a rank has ended the run.
        failed: why it is over, if a group did not get an answer, and none was lost.
    """

    number: int
    lives: dict[int, str]
    since: dict[int, int]
    phase: int
    votes: dict[tuple[int, int], Message] = field(default_factory=dict)
    attempt: int = 0
    is_over: bool = False
    doubt: float | None = None
    lost: set[int] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    failed: str = ""

    @classmethod
    def after(
        cls, before: Generation | None, known: int, lives: dict[int, str], fresh: Collection[int], phase: int
    ) -> Generation:  # fmt: skip
        """Return the generation that follows ``before``.

        Args:
            before: the last generation that this coordinator knows.
            known: the largest number of a generation that its ranks know.
            lives: slot → the life of its group.
            fresh: its groups without state.
            phase: what comes next.
        """
        since = before.since if before is not None else {}
        number = 1 + max(before.number if before is not None else 0, known)
        return cls(number, lives, {slot: number if slot in fresh else since.get(slot, number) for slot in lives}, phase)

    @property
    def living(self) -> list[int]:
        """The groups that are not lost."""
        return sorted(set(self.lives) - self.lost)

    def is_doubt_over(self, since: float) -> bool:
        """Return whether a group had voted and died before ``since``, and others have not voted."""
        return self.doubt is not None and self.doubt < since

    def awaits(self, rank: Rank, vote: Message) -> bool:
        """Return whether a vote counts.

        It does not if the rank does not know yet that its generation or attempt is over.
        """
        is_member = vote.get("generation") == self.number and self.lives.get(rank.slot) == rank.life
        return is_member and not self.is_over and vote.get("attempt") == self.attempt

    def answer(
        self, ranks: Iterable[Rank], fresh: Collection[int], step: int, expected: list[int]
    ) -> Message:  # fmt: skip
        """Return what its ranks are told.

        Args:
            ranks: its ranks.
            fresh: its groups without state.
            step: the number of committed steps.
            expected: groups that may join later.
        """
        leaders = sorted((rank for rank in ranks if rank.inside == 0), key=lambda rank: rank.slot)
        return {
            "type": "generation", "generation": self.number, "name": uuid.uuid4().hex, "step": step,
            "phase": self.phase,
            "members": [leader.as_member(is_fresh=leader.slot in fresh) for leader in leaders],
            "writer": min(self.lives, key=lambda slot: (self.since[slot], slot)), "expected": expected,
        }  # fmt: skip


@dataclass
class Loss:
    """A loss that is not reported yet, because the others have not gone on."""

    slot: int
    host: str
    cause: str
    at: float
    step: int

    def what(self) -> str:
        """Return what happened, in words."""
        return f"group {self.slot} on {self.host} was lost after step {self.step} ({self.cause})"

    def report(self, living: str, now: float) -> str:
        """Return the line for the user, once the groups ``living`` have committed a step."""
        return f"{self.what()}; groups {living} went on after {now - self.at:.2f} s"


@dataclass
class Arrival:
    """Groups that have joined after ``step``, and have not taken part in a step yet.

    ``at``: when the last of them was ready.
    """

    groups: list[str]
    step: int
    generation: int
    at: float

    def report(self, living: str, now: float) -> str:
        """Return the line for the user, once the groups ``living`` have committed a step."""
        joined = f"{' and '.join(self.groups)} joined after step {self.step}, {now - self.at:.2f} s after"
        whom = "it was" if len(self.groups) == 1 else "they were"
        return f"{joined} {whom} ready; generation {self.generation} has groups {living}"


class News:
    """Losses and arrivals after which no step was committed yet.

    Args:
        say: reports a line to the user.
        clock: measures seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]):
        self._say, self._clock = say, clock
        self._news: list[Loss | Arrival] = []

    def add(self, news: Loss | Arrival) -> None:
        """Note something to report."""
        if isinstance(news, Loss):  # perhaps of a group that has joined, and has not taken part yet
            for each in self._news:
                if isinstance(each, Arrival):
                    each.groups = [name for name in each.groups if name != f"group {news.slot} on {news.host}"]
            self._news = [each for each in self._news if not isinstance(each, Arrival) or each.groups]
        self._news.append(news)

    def begin(
        self, before: Generation | None, now: Generation, ranks: Sequence[Rank], fresh: Collection[int], groups: int,
        step: int,
    ) -> None:  # fmt: skip
        """Tell of a new generation, and note the arrival of groups that have joined.

        Args:
            before: the generation before it.
            now: the new one.
            ranks: its ranks.
            fresh: its groups without state.
            groups: the number of groups of the run.
            step: the step after which it begins.
        """
        for line in lines_about(before, ranks, fresh, groups):
            self._say(line)
        if before is not None and 0 < len(fresh) < len(now.lives):
            arrived = [rank for rank in ranks if rank.slot in fresh]
            leaders = sorted((rank for rank in arrived if rank.inside == 0), key=lambda rank: rank.slot)
            names = [f"group {rank.slot} on {rank.host}" for rank in leaders]
            self.add(Arrival(names, step, now.number, max(rank.asked for rank in arrived)))

    def report(self, living: Iterable[int]) -> None:
        """Report all, because the groups ``living`` have committed a step now."""
        groups = ", ".join(map(str, living))
        for news in self._news:
            self._say(news.report(groups, self._clock()))
        self._news.clear()

    def end(self, *why: str) -> None:
        """Report the losses after which no step was committed, because the run ends, and why."""
        for news in self._news:
            if isinstance(news, Loss):
                self._say(f"{news.what()}; no step was committed after that")
        self._news.clear()
        for line in why:
            self._say(line)

    def forget(self, slots: Collection[int]) -> None:
        """Do not report the losses of these groups."""
        self._news = [news for news in self._news if not (isinstance(news, Loss) and news.slot in slots)]


def lines_about(before: Generation | None, ranks: Sequence[Rank], fresh: Collection[int], groups: int) -> Iterator[str]:
    """Yield what the user is told about a new generation, besides losses and arrivals.

    Args:
        before: the generation before it.
        ranks: its ranks.
        fresh: its groups without state.
        groups: the number of groups of the run.
    """
    lives = {rank.slot: rank.life for rank in ranks}
    here = ", ".join(map(str, sorted(lives)))
    if before is None:
        known = {slot for rank in ranks for slot in slots_of(rank.joining)}
        for slot in sorted(known - lives.keys()):
            yield f"group {slot} was lost, because it did not come back to the coordinator in time; the others go on"
    elif before.failed and before.lives == lives:
        yield (
            f"groups {here} try again, because {before.failed}; if this is repeated, two hosts do not reach each "
            "other, or a group is slower than the limits in the section training"
        )
    if len(fresh) == len(lives) < groups:
        absent = ", ".join(str(slot) for slot in range(groups) if slot not in lives)
        yield f"the run begins with groups {here}; others may join it later: {absent}"


def text_of(message: Message) -> str:
    """Return the text that a rank wants to show. Raises ProtocolError if it is not a short text."""
    text = message.get("text")
    if not isinstance(text, str) or len(text) > _MOST_SAID:
        raise ProtocolError("a text that is too long, or none")
    return text


def check_facts(vote: Message, most_bytes: int) -> None:
    """Raise ProtocolError if a vote has too large facts, or a step that is not a number."""
    size, _ = len(json.dumps(vote.get("facts"))), shown_step(vote)
    if size > most_bytes:
        raise ProtocolError(f"facts of {size:,} bytes, and {most_bytes:,} are possible")


def shown_step(vote: Message) -> int | None:
    """Return the number of the step for messages, if votes are not steps, or None.

    Raises ProtocolError if it is not a number.
    """
    step = vote.get("at")
    if step is not None and (type(step) is not int or not 0 <= step < 2**53):
        raise ProtocolError("a vote for a step that is not a number")
    return step


def slots_of(joining: Message | None) -> list[int]:
    """Return the groups of the generation that a rank knows, by its request to join."""
    members = joining.get("members") if joining is not None else None
    return [slot for slot in members if type(slot) is int] if isinstance(members, list) else []
