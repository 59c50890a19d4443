"""One rank's part in an elastic run: it meets the living groups, votes, and brings returning groups
up to date.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ..backends.sharded import ShardedBackend
from ..engine import SDPEngine
from ..errors import CheckpointError, NonFiniteError
from ..placement.layout import Layout
from .abort import Abort, WaitLimits
from .bringing_back import GIVE_UP, HolderWait, UnitsLostError, bring_up_to_date, load_lost_units
from .coordination.assembly import Assembly, Decision
from .coordination.errors import CutOffError, RunFinishedError, StepAbortedError, UnansweredError
from .coordination.member import CoordinatorClient
from .inside import all_inside, restorer
from .links import Links
from .living import lost_units
from .returning import facts_of, take_facts
from .rounds import ElasticRounds, Untold, sharded_backend
from .salvage import salvage
from .voting import vote_together

log = logging.getLogger("sdp")

T = TypeVar("T")

LAST_CHECKPOINT = "a last checkpoint"  # a part, see Progress


class Session:
    """What one rank knows of the other groups.

    Args:
        client: the connection to the coordinator.
        engine: the engine, which was built with all groups in mind.
        limits: how long to wait for other groups.
        checkpoints: the directory of the run's checkpoints.
        wait_seconds: how long to wait for a group that holds units that no living one holds.

    Attributes:
        layout: the layout with all groups.
        assembly: the present generation.
        rounds: with local steps, the rounds.
        stops: returns whether the run shall stop, which ends a wait.
        has_lost_units: whether units were brought back from a checkpoint in the last meeting.
        rows: with local steps, returns what the ranks exchange about each step that they have not
            told each other.
    """

    def __init__(
        self, client: CoordinatorClient, engine: SDPEngine, limits: WaitLimits, checkpoints: Path, wait_seconds: float
    ):
        self._client, self._engine, self._checkpoints = client, engine, checkpoints
        self.rounds = ElasticRounds(engine) if engine.config.sdp.sync is not None else None
        self._votes = 0  # that were committed
        self._wait = HolderWait(client, engine.layout, checkpoints, wait_seconds, lambda: self.stops())
        self.stops: Callable[[], bool] = lambda: False
        self.rows: Callable[[], list[list[int]]] = list
        self.has_lost_units = False
        self._links = Links(client, engine, self._backend, limits)
        self.layout: Layout = engine.layout
        self.assembly: Assembly | None = None
        self._is_fresh, self._has_ended = True, False  # ended: only the last vote is missing

    @property
    def _backend(self) -> ShardedBackend:
        return sharded_backend(self._engine)

    @property
    def _abort(self) -> Abort | None:
        return self._links.abort

    @property
    def slot(self) -> int:
        """The number of this group among all groups of the run."""
        return self._client.identity.slot

    @property
    def ranks(self) -> int:
        """The number of ranks of each group."""
        return self._client.identity.ranks

    @property
    def writes_files(self) -> bool:
        """Whether this rank writes the run's files in the present generation."""
        assert self.assembly is not None
        return self.assembly.writer == self.slot and self._client.identity.inside == 0

    def meet(self, phase: int, position: Callable[[], None] = lambda: None) -> Assembly:
        """Meet the living groups, in a new generation. Collective among them.

        Args:
            phase: what comes next for this rank.
            position: called after the meeting, when this rank has its share of the data, but
                before a returning group gets its state.

        Raises:
            UnitsLostError: no living group holds some units.
            PeerLostError: this group was cut off, or the run cannot go on.
            RunFinishedError: the run is over.
        """
        while True:
            self._links.leave()
            found = self._client.join(step=self._position, phase=self._wait.phase(phase), fresh=self._is_fresh)
            self._votes = found.step
            fresh, everyone_is_fresh = found.fresh, found.is_start
            with_state = [member.slot for member in found.members if everyone_is_fresh or not member.fresh]
            lost = lost_units(self.layout, with_state)
            if lost and lost_units(self.layout, found.slots):
                if self._has_ended:  # the coordinator died while it told the others that the run is over
                    self._client.leave()
                    raise RunFinishedError
                if found.phase == GIVE_UP:
                    self._end_without(lost, found)
                self._wait.look(lost, found)
                continue
            self._wait.end()
            try:
                told = self.protect(partial(self._connect, found, gives_up=bool(lost)))
                if told is not None and self.rounds is not None:
                    self.vote(None, found.phase)  # all take what was told, or none
                    self.rounds.take(told)
                self.protect(partial(self._bring_up_to_date, [] if everyone_is_fresh else fresh, position, lost))
                self.protect(self._refresh_copies, defers=True)
            except StepAbortedError as error:
                log.info("generation %d is over before it began: %s", found.number, error)
                continue
            self._is_fresh, self._has_ended, self.assembly, self.has_lost_units = False, False, found, bool(lost)
            return found

    @property
    def _position(self) -> int:
        """Return what the coordinator counts: committed steps, or with local steps votes."""
        return self._engine.global_steps if self.rounds is None else self._votes

    def vote(self, facts: Any, phase: int = 0) -> Decision:
        """Vote for the present step, and return when it is committed. Raises StepAbortedError.

        Args:
            facts: a small JSON value that all ranks get.
            phase: what comes next for this rank if the coordinator is gone.
        """
        abort, at = self._abort, self._engine.global_steps if self.rounds is not None else None
        over = (abort.failed or "a group is lost") if abort is not None and abort.is_over else None
        decision = self._vote(facts, phase, at=at, over=over)
        self._votes += 1
        if abort is not None and len(decision.facts) < self._engine.world_size:
            abort.failed = "the coordinator was gone"  # so this generation finishes nothing more
        return decision

    def _vote(self, facts: Any, phase: int = 0, *, at: int | None = None, over: str | None = None) -> Decision:
        """Vote as all ranks of this group do. Raises StepAbortedError."""
        where = {"step": self._position, "phase": phase, "fresh": self._is_fresh}
        return vote_together(self._client, facts, **where, at=at, over=over)

    def take_state(self, load: Callable[[], T], phase: Callable[[], int]) -> T:
        """Return what ``load`` returns, which gives all living groups the state of the run.

        Args:
            load: loads the state. All groups do this together.
            phase: returns what comes next when it is loaded.

        Raises:
            StepAbortedError: a group was lost meanwhile, so this group has no state.
        """
        before = facts_of(self._engine, self._backend)
        try:
            result = self.protect(load)
            self.protect(self._refresh_copies, defers=True)
            with suppress(UnansweredError):  # the coordinator was gone; it knows that this rank has state
                self.vote(None, phase())
        except StepAbortedError:
            # A group that comes back is at step 0. So this one must be there, too.
            take_facts(self._engine, self._backend, before, before["rates"])
            self._is_fresh = True
            raise
        return result

    def tell(self, text: str) -> None:
        """Let the coordinator say something to the user, once for all groups."""
        if self.writes_files:
            self._client.tell(text)

    def leave_early(self) -> None:
        """Leave the run, which goes on without this group."""
        self._client.leave_early()

    def finish(self) -> None:
        """Leave the run, which is over. Collective. Raises StepAbortedError."""
        try:
            self.vote(None)
        except UnansweredError:
            self._has_ended = True
            raise
        self._client.leave()

    # -- losses ------------------------------------------------------------------------------------

    def protect(self, action: Callable[[], T], *, defers: bool = False) -> T:
        """Return what ``action`` returns, or let all ranks of this group raise StepAbortedError.

        Without this, a rank that does not notice a loss in time would go on to a collective inside
        the group, and wait there for a rank that has left.

        Args:
            action: something that all ranks of the group do. Between its first and its last message
                to other groups it may have collectives inside the group only with ``defers``.
            defers: if a group is lost, ``action`` runs on to its end with worthless values.
        """
        result: list[T] = []
        restore = restorer(self._backend.module, self.layout) if defers else lambda: None
        try:
            with self.deferred() if defers else nullcontext():
                result.append(action())
            failed = self._abort.failed if self._abort is not None and defers and self._abort.is_over else None
        except StepAbortedError as error:
            failed = str(error)
        with self._client.progress.waiting(inside=True):
            succeeded = all_inside(failed is None)
        if not succeeded:
            restore()
            raise StepAbortedError(failed or "a group is lost")
        return result[0]

    @contextmanager
    def entered(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """A context that all ranks of this group enter, or none.

        Entering it may send messages to other groups and inside the group.
        """
        with ExitStack() as stack:
            self.protect(lambda: stack.enter_context(context), defers=True)
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context in which only :meth:`vote` notices that a group is lost."""
        assert self._abort is not None
        with self._abort.deferred():
            yield

    def look(self) -> None:
        """Raise StepAbortedError if a group is lost and this group has one rank.

        Several ranks would have to agree, which costs a message. They notice in their next vote.
        """
        if self._abort is not None and dist.get_world_size() == 1:
            self._abort.check()

    def look_for_cut(self) -> None:
        """Raise CutOffError if the others go on without this group, so that it starts again."""
        if self._client.is_cut_off:
            raise CutOffError(f"group {self.slot} was cut off ({self._client.reason}); it starts again")

    # -- a meeting ---------------------------------------------------------------------------------

    def _bring_up_to_date(self, fresh: Sequence[int], position: Callable[[], None], lost: Sequence[str]) -> None:
        """Give groups without state that of the others, when all are connected.

        Args:
            fresh: those that get the state of the others, by their numbers among the living.
            position: see :meth:`meet`.
            lost: units that only they hold, and load from the newest checkpoint.
        """
        position()
        if fresh:
            load = partial(load_lost_units, self._client, self.layout, self._checkpoints, lost)
            bring_up_to_date(self._engine, self._backend, fresh, load)

    def _refresh_copies(self) -> None:
        """Bring weights and frozen copies up to date for the next step's masking. Collective."""
        engine, backend = self._engine, self._backend
        backend.write_weights()
        backend.enter_phase(backend.phases[engine.config.masking_schedule.at(engine.global_steps + 1)])

    def _end_without(self, lost: Sequence[str], found: Assembly) -> NoReturn:
        """End the run of all living groups, with a checkpoint if possible. Collective among them.

        Raises UnitsLostError.
        """
        reason, written = self._wait.reason, None
        self._client.progress.begin(LAST_CHECKPOINT)
        try:
            self._links.connect_world(found)
            if self.rounds is not None and self.assembly is not None:
                self.rounds.give_up(self.assembly.slots)
                self.rounds.take(self.rounds.tell_each_other(self.slot, self.rows, always=True) or [])
            self._backend.drop_copies()
            written = salvage(self._engine, self._backend, self.layout, self._checkpoints, lost, found.slots)
        except (CheckpointError, NonFiniteError, StepAbortedError) as error:
            written = f"no further checkpoint: {error}"
        with suppress(StepAbortedError):  # nobody may end before all have finished
            facts = self._vote([reason, written]).facts
            reason, written = (next((each for each in column if each), None) for column in zip(*facts, strict=True))
        message = f"{self._wait.what_is_lost(lost)}, and {reason or 'others gave up'}"
        message += f"; {written}" if written else ""
        self._client.fail(message)
        raise UnitsLostError(message)

    def _connect(self, found: Assembly, *, gives_up: bool) -> list[Untold] | None:
        """Make the process groups of a generation, and exchange what only some groups have to tell.

        ``gives_up``: whether the others give up the round, because a unit is lost.
        """
        self._links.connect(found)
        if self.rounds is None:
            return None
        if gives_up and not self._is_fresh and self.assembly is not None:
            self.rounds.give_up(self.assembly.slots)
        return self.rounds.tell_each_other(self.slot, self.rows)
