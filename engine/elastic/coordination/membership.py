"""Which groups live, and whether they commit a step. The coordinator's rules, without its sockets.

A *generation* is a set of groups that reduce together. It ends when a group is lost or when a group
joins. In each step all ranks of the generation vote, after their reductions and before the update.
The step is committed if all vote for it. A group that votes for a step and dies then costs nothing.
A group that dies before its vote costs this step: the others repeat it in the next generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from .beginning import Beginning
from .lives import Lives
from .messages import MOST_ANSWER_BYTES, Message, ProtocolError
from .progress import SIGNS, PausedRanks
from .records import GIVE_UP, START_AGAIN, STEP, Generation, Loss, News, Rank, check_facts, shown_step, text_of
from .roster import Peer, Roster

_DOUBT_SECONDS = 1.0  # how long the votes of others are awaited, after a group voted and died


class Membership:
    """The state of a coordinator. Not thread-safe.

    Args:
        groups: the number of SDP groups of the run.
        ranks: the ranks of each group.
        send: sends a message to a rank.
        close: closes the connection to a rank.
        say: reports a line to the user.
        heartbeat_seconds: after so long a silence, a rank's group is cut off.
        wait_seconds: how long to wait for groups without which nothing can go on.
        min_groups: how many groups are enough to begin the run, None for all.
        last_call_seconds: how long to wait for the others when enough groups have come.
    """

    def __init__(
        self,
        groups: int,
        ranks: int,
        *,
        send: Callable[[Peer, Message], None],
        close: Callable[[Peer], None],
        say: Callable[[str], None],
        heartbeat_seconds: float = 5.0,
        wait_seconds: float = 600.0,
        min_groups: int | None = None,
        last_call_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._groups, self._ranks = groups, ranks
        self._most_facts = MOST_ANSWER_BYTES // 2 // (groups * ranks)  # the answer has those of all ranks
        self._send, self._say, self._clock = send, say, clock
        self._close = lambda peer: (self._paused.forget(peer), close(peer))
        self._heartbeat, self._wait = heartbeat_seconds, wait_seconds
        self._peers, self.lives = Roster(ranks), Lives()
        self._beginning = Beginning(groups, min_groups or groups, last_call_seconds)
        self._news, self._paused = News(say, clock), PausedRanks(heartbeat_seconds)
        self._waiting_since: float | None = None
        self.generation: Generation | None = None
        self.step = 0  # votes that were committed
        self._shown: int | None = None  # the step for messages, if votes are not steps
        self.is_finished = False
        self.told: set[int] = set()  # groups that know that the run is over
        self.failure: str | None = None
        self.gone: set[int] = set()  # groups that nobody will start again, as the launcher knows

    @property
    def living(self) -> list[int]:
        """The groups of the present generation that are not lost."""
        return self.generation.living if self.generation is not None else []

    def hear(self, peer: Peer, message: Message) -> None:
        """Process a message of a rank. Raises ProtocolError if it makes no sense."""
        kind = message["type"]
        if kind in ("join", "ask"):
            self._hear_join(peer, message)
            return
        rank = self._peers.get(peer)
        if rank is None:
            raise ProtocolError(f"{kind!r} before a join")
        rank.heard = self._clock()
        if kind == "vote":
            self._hear_vote(rank, message)
        elif kind == "bye":
            rank.is_leaving = True
            self._paused.forget(peer)
            self.told.add(rank.slot)
            if self.generation is not None:
                self.generation.ended.add(rank.slot)
            self._finish_if_over()
        elif kind == "leave":
            self.lose(peer, "it was told to stop")
        elif kind == "beat":
            if not rank.is_leaving:
                self._paused.hear(peer, rank.heard, **{key: message[key] for key in SIGNS & message.keys()})
            self._send(peer, {"type": "beat"})  # so that the rank notices a silent coordinator
        elif kind == "tell":
            self._say(text_of(message))
        elif kind == "fail":
            self._fail(text_of(message))
        else:
            raise ProtocolError(f"an unknown message {kind[:40]!r}")

    def _finish_if_over(self) -> None:
        """Finish the run if some groups have ended, and only groups are left that wait to join."""
        now = self.generation
        if now is None or self.is_finished or not now.ended or self._peers.stay(now.lives):
            return
        self.is_finished = True
        self._news.end()
        for peer, rank in list(self._peers.items()):
            if not rank.is_leaving:
                self._send(peer, {"type": "finished"})
                self.told.add(rank.slot)

    def _hear_join(self, peer: Peer, message: Message) -> None:
        rank = Rank.of(message, self._groups, self._ranks, self._clock())
        if self.is_finished or self.failure is not None or self.lives.is_cut(rank.life):
            kind = "finished" if self.is_finished else "failed" if self.failure is not None else "cut"
            self.told |= {rank.slot} if self.is_finished and message["type"] == "join" else set()
            self._send(peer, {"type": kind, "reason": self.failure or "its group was cut off"})
            return
        if (now := self.generation) and not message.get("fresh") and now.lives.get(rank.slot) != rank.life:
            self.lives.lose(rank.life)
            self._send(peer, {"type": "cut", "reason": "the others did not wait for it any longer"})
            return
        if message["type"] == "ask":
            self._send(peer, {"type": "beat"})
            return
        for other, known in list(self._peers.items()):
            if known.slot == rank.slot and known.life != rank.life:
                self.lose(other, "it was started again")
        for other in self._peers.add(peer, rank):
            self._close(other)
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        self._form()

    def _hear_vote(self, rank: Rank, message: Message) -> None:
        now = self.generation
        if now is None or not now.awaits(rank, message):
            return
        check_facts(message, self._most_facts)
        if not message.get("ok"):
            now.failed = now.failed or f"group {rank.slot} gave up ({text_of(message)})"
            self._abort(now.failed)
            return
        now.votes[rank.slot, rank.inside] = message
        self._decide()

    def _decide(self) -> None:
        """Commit the attempt if all have voted for it."""
        now = self.generation
        if now is None or now.is_over or len(now.votes) < len(now.lives) * self._ranks:
            return
        facts = [now.votes[key].get("facts") for key in sorted(now.votes)]
        newcomers = bool(self._peers.complete_fresh(self.living))
        decision = {"type": "decision", "generation": now.number, "attempt": now.attempt, "commit": True}
        shown = [step for step in map(shown_step, now.votes.values()) if step is not None]
        self.step, self._shown = self.step + 1, max(shown, default=None)
        for peer in self._peers.of(self.living):
            self._send(peer, decision | {"facts": facts, "newcomers": newcomers})
        if now.phase != GIVE_UP:
            self._news.report(self.living)
        now.votes, now.attempt = {}, now.attempt + 1
        if now.lost:
            now.doubt = None
            self._abort("a group is lost")

    def lose(self, peer: Peer, cause: str) -> None:
        """A connection is closed, or is to be closed for ``cause``: its whole group is lost."""
        self._lose(peer, cause)
        self._finish_if_over()

    def _lose(self, peer: Peer, cause: str) -> None:
        rank = self._peers.pop(peer, None)
        now = self.generation
        is_silent = rank is not None and (self.lives.is_awaited(rank.life) if now is None else rank.life in now.silent)
        if rank is not None and not is_silent:
            self._send(peer, {"type": "cut", "reason": cause})
        self._close(peer)
        if rank is None or rank.is_leaving:
            if rank is not None and now is not None and now.lives.get(rank.slot) == rank.life:
                now.lost.add(rank.slot)  # so nobody waits for it, if others have not ended
                self._form()
            return
        self.lives.lose(rank.life)
        for other in self._peers.pop_lives({rank.life}):
            if not is_silent:
                self._send(other, {"type": "cut", "reason": f"rank {rank.inside} of its group: {cause}"})
            self._close(other)
        if now is None or now.lives.get(rank.slot) != rank.life or rank.slot in now.lost:
            return
        now.lost.add(rank.slot)
        self._news.add(Loss(rank.slot, rank.host, cause, self._clock(), self._shown or self.step))
        if not self.living:
            if not now.ended:
                self._await_all(now, "no group is heard any longer", rank.life)
            return
        has_voted = all((rank.slot, inside) in now.votes for inside in range(self._ranks))
        if has_voted and not now.is_over:
            now.doubt = self._clock()
        else:
            self._abort(f"group {rank.slot} on {rank.host} is lost: {cause}")
        self._decide()
        self._form()

    def _await_all(self, now: Generation, why: str, *lives: str) -> None:
        """Fail, or wait for groups that are silent, because this host may be the one cut off."""
        if not now.silent or not self.lives.expect({*now.silent, *lives}, self.step):
            self._fail("all groups are lost" + f"; {START_AGAIN}" * bool(self.step))
            return
        self._say(f"{why}; the groups have {self._wait:g} s to come back with their state")
        self._news.forget([slot for slot, each in now.lives.items() if self.lives.is_awaited(each)])
        self.generation, self._waiting_since = None, self._clock()

    def _abort(self, reason: str) -> None:
        """Tell all at once that this generation commits nothing more."""
        now = self.generation
        if now is None or now.is_over:
            return
        now.is_over, now.votes = True, {}
        for peer in self._peers.of(self.living):
            self._send(peer, {"type": "abort", "generation": now.number, "reason": reason})

    def _fail(self, reason: str) -> None:
        if self.failure is None and self.step:
            self._news.end(f"the run cannot go on: {reason}")
        self.failure = self.failure or reason
        for peer in list(self._peers):
            self._send(peer, {"type": "failed", "reason": reason})

    def wake_up(self, left: Collection[Peer]) -> None:
        """Go on after this process was stopped, and these connections have ended meanwhile."""
        self._peers.hear_all(self._clock())
        self._waiting_since = None if self._waiting_since is None else self._clock()
        now = self.generation
        if self.failure is not None or (now is not None and now.ended):
            return
        torn = self._peers.torn(left, now)
        for peer in self._peers.pop_lives(torn):
            self._close(peer)
        if now is not None and not torn.isdisjoint(now.lives.values()):
            now.silent.update(now.lives[slot] for slot in now.living)
            self._await_all(now, "the coordinator's process was stopped for a while")

    def tick(self) -> None:
        """Look for ranks that are silent. Call this several times in a heartbeat."""
        now = self._clock()
        for peer, rank in list(self._peers.items()):
            if peer in self._peers and now - rank.heard > self._heartbeat:
                if self.generation is not None and now - self._peers.heard(rank.life) > self._heartbeat / 2:
                    self.generation.silent.add(rank.life)
                self.lose(peer, f"no heartbeat for {self._heartbeat:g} s")
        groups = {peer: rank.slot for peer, rank in self._peers.of(self.living).items()}
        if (worst := self._paused.worst(now, groups)) is not None:
            self.lose(worst[0], f"no progress for {worst[1]:.1f} s")
        if self.generation is not None and self.generation.is_doubt_over(now - _DOUBT_SECONDS):
            self._abort("a group is lost")
        if self._waiting_since is not None:
            self._form()

    def _form(self) -> None:
        """Begin the next generation if all that it needs have asked for it."""
        if self.failure is not None or self.is_finished:
            return
        old = self._peers.with_state(self.generation, self._clock(), 2 * self._heartbeat)
        if old is None:
            if self.generation is None:
                self._give_up_if_late(None)
            return
        # The last generation may have ended before these got their state.
        again = [slot for slot in old if self._peers.joining(slot, "fresh")]
        old = [slot for slot in old if slot not in again]
        if again and not old and self.step:
            self._fail(f"all groups that had the state of the run are lost; {START_AGAIN}")
            return
        step, behind, commits = self._peers.steps_of(old)
        for slot in set(behind) - set(commits):
            old.remove(slot)
            for peer in self._peers.of([slot]):
                self.lose(peer, "it missed a step")
        phase = min((self._peers.joining(slot, "phase") for slot in old), default=STEP)
        fresh = self._peers.complete_fresh(old) if phase == STEP else []
        if not old and self.generation is None and self.step:  # all fell silent, and none with state is back
            if len({*fresh, *self.gone}) == self._groups:
                self._fail(f"all groups that had the state of the run are lost; {START_AGAIN}")
            self._give_up_if_late(None)
            return
        if not old:  # the start of the run
            if not self._beginning.may_begin(self._peers, fresh, self.gone, self._clock()):
                if self._beginning.is_hopeless(self._peers, fresh, self.gone):
                    self._fail(f"group {min(self.gone)} was lost before the first step, and is not started again")
                self._give_up_if_late(fresh)
                return
            step = max(self._peers.joining(slot, "step") for slot in fresh)
            phase = min(self._peers.joining(slot, "phase") for slot in fresh)
        self._begin(sorted({*old, *fresh}), fresh, phase, step, commits)

    def _begin(self, slots: list[int], fresh: list[int], phase: int, step: int, commits: list[int]) -> None:
        before, ranks = self.generation, self._peers.of(slots)
        lives = {rank.slot: rank.life for rank in ranks.values()}
        self.lives.begin(lives.values())
        known = max(self._peers.joining(slot, "generation") for slot in slots)
        self.generation = now = Generation.after(before, known, lives, fresh, phase)
        self.step, self._waiting_since = step, None
        expected = sorted(set(range(self._groups)) - set(slots) - self.gone)
        answer = now.answer(ranks.values(), fresh, step, expected)
        self._news.begin(before, now, list(ranks.values()), fresh, self._groups, self._shown or step)
        for peer, rank in ranks.items():
            rank.joining = None
            self._send(peer, answer | {"commit_pending": rank.slot in commits})

    def _give_up_if_late(self, here: list[int] | None) -> None:
        is_late = self._waiting_since is not None and self._clock() - self._waiting_since > self._wait
        if is_late and (missing := self._beginning.what_is_missing(self._peers, here, self._wait)) is not None:
            self._fail(missing)
