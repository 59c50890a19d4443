"""The training loop of an elastic run: a step that a lost group spoils is made again by the
others.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ...engine.distributed.agreement import gather_json
from ...engine.elastic.bringing_back import UnitsLostError
from ...engine.elastic.coordination.assembly import Assembly
from ...engine.elastic.coordination.errors import RunFinishedError, StepAbortedError
from ...engine.elastic.coordination.records import STEP
from ...engine.elastic.living import lost_units
from ...engine.elastic.session import Session
from ...engine.errors import PeerLostError
from ..runs.run_files import evaluated_steps
from .elastic_files import ElasticFiles
from .loop.meter import row
from .loop.training_run import TrainingRun
from .stopping import LEAVE_SECONDS, LeavesError, Outcome, Told, decide

log = logging.getLogger("sdp")

T = TypeVar("T")

# Phases.
MEETING, BETWEEN_STEPS = "meeting the other groups", "between steps"
COMPARISON, RECALIBRATION = "comparing holders", "recalibration"

# What comes next after a step, in this order. A group may join only before a step, and with local
# steps before a round. The first two and the last one are of local steps, see elastic_rounds.py.
AGREE, COPY, CHECK, EVALUATE, SAVE, INNER = range(6)


class ElasticTrainer:
    """The loop of one rank over the steps of ``run``.

    Each group keeps its share of the data until a step is committed. After a loss, the living
    groups share out the samples from the last committed step on. So a sample counts once.

    Args:
        run: this rank's run, without files and without observers that write some.
        session: this rank's part in the meetings of groups.
        resume: whether to go on from the newest checkpoint.
    """

    def __init__(self, run: TrainingRun, session: Session, *, resume: bool):
        self._run, self._engine, self._session, self._resumes = run, run.engine, session, resume
        self._files = ElasticFiles(run, session, resumes=resume)
        self._phase, self._newcomers, self._stop = EVALUATE, False, Outcome()
        self._batches: Iterator[Any] = iter(())
        self._committed: Any = None  # the loader's state after the last committed step
        self._most: list[int] = []  # the largest of what the ranks sent with their votes in the last step
        # Bytes of the present step up to the vote; bytes of the step before from its vote on.
        self._counted, self._late = Counter[str](), Counter[str]()
        self._must_meet = False  # the coordinator was gone, and the others meet
        self._is_resumed = resume  # whether there was a checkpoint
        self._last_evaluated = -1  # step
        self._is_start = False  # whether the run begins, and its files are not open yet
        self._engine.before_update = self._vote
        session.stops = lambda: bool(run.signals.received)

    def train(self) -> int:
        """Run to the last step, and make again what a lost group spoils. Returns the exit code."""
        started = time.perf_counter()
        run = self._run
        with run.signals.caught(), contextlib.suppress(RunFinishedError):
            try:
                self._meet()
                if self._resumes and self._is_start:
                    self._resume()
                return self._repeat(lambda: self._train_and_end(started))
            except LeavesError:
                return self._leave()
            except UnitsLostError as error:
                self._tell_given_up()
                newest = self._run.checkpoints.newest()
                raise PeerLostError(f"{error}; the run cannot go on; {newest}") from None
        log.info("the other groups have finished the run")
        return 128 + run.stop_signal if run.is_stopped_early else 0

    def close(self) -> None:
        """Close what is open. Called once, also when the run fails."""
        self._files.close()
        self._run.close()

    # -- the loop ----------------------------------------------------------------------------------

    def _repeat(self, action: Callable[[], Any]) -> Any:
        """Call ``action``, again after each loss of a group, and return its result."""
        while True:
            try:
                return action()
            except StepAbortedError:
                self._meet()

    def _train_and_end(self, started: float) -> int:
        """Make all steps, and end. Called again if another group was lost at the end."""
        self._go_on_to_the_end()
        return self._end(time.perf_counter() - started)

    def _go_on_to_the_end(self) -> None:
        while not self._is_done():
            if self._session.slot in self._stop.leaving:
                raise LeavesError
            if self._stop.leaving:
                self._meet()
            self._do_what_is_due()
            if self._must_meet or (self._newcomers and self._phase == STEP):
                self._meet()  # it may begin with something else than a step, if another group was lost in it
            elif not self._is_done():
                self._step()

    def _is_done(self) -> bool:
        run = self._run
        return self._phase >= INNER and bool(self._engine.global_steps >= run.steps or run.stop_signal)

    def _do_what_is_due(self) -> None:
        """Check, evaluate and save after a step, from the present phase on."""
        run, engine = self._run, self._engine
        training, step, is_last = run.config.training, engine.global_steps, engine.global_steps == run.steps
        evaluates = step == 0 or run.evaluator.is_due(step, is_last=is_last)
        saves = bool(training.save_every and step and (is_last or step % training.save_every == 0))
        if self._phase <= AGREE:
            self._agree(evaluates or saves, is_last=is_last)
        if self._phase <= COPY:
            self._copy()
            self._phase = CHECK
        if self._phase <= CHECK:
            if self._checks(step):
                run.beat.at(step, COMPARISON, training.step_timeout)
                self._together(engine.check_holders)
            self._phase = EVALUATE
        if self._phase <= EVALUATE:
            if step == 0 or (evaluates and not (run.stop_signal and not is_last)):
                self._evaluate(is_last=is_last)
            self._phase = SAVE
        if self._phase <= SAVE:
            if saves and not engine.was_step_skipped and not run.stop_signal:
                self._calibrated(lambda: self._together(run.checkpoints.save))
            self._phase = STEP if self._is_round_start else INNER

    @property
    def _is_round_start(self) -> bool:
        """Whether all holders of a unit have the same weights, so that a group may join."""
        return True

    def _checks(self, step: int) -> bool:
        """Return whether holders are compared after ``step``."""
        interval = self._run.config.sdp.check_interval
        return bool(interval and step and step % interval == 0)

    def _together(self, action: Callable[[], T], *, defers: bool = False) -> T:
        """Call ``action``, as all groups do, and return its result. See :meth:`Session.protect`."""
        return self._session.protect(action, defers=defers)

    def _calibrated(self, save: Callable[[], T]) -> T:
        """Call ``save``, which writes a checkpoint, and return its result.

        The full model's statistics of batch norms are measured first. Inside the save, errors could
        not be deferred: if one rank left it, the others of its group would wait for ever.
        """
        self._run.beat.at(self._engine.global_steps, RECALIBRATION, self._run.config.training.save_timeout)
        with self._session.entered(self._run.evaluator.recalibrated()):
            return save()

    def _agree(self, must_agree: bool, *, is_last: bool) -> None:
        """A no-op: all groups agree inside each step.

        Args:
            must_agree: whether more follows that all groups do together.
            is_last: whether the run ends with this step.
        """

    def _copy(self) -> None:
        """A no-op: copies are awaited when they are needed."""

    def _after_meeting(self, before: Assembly, now: Assembly) -> None:
        """A no-op. Called after each meeting but the first.

        Args:
            before: the last generation.
            now: the new one.
        """

    def _tell_given_up(self) -> None:
        """A no-op: no line of a step is withheld until later."""

    def _step(self) -> None:
        """Make a step. Inside it, the engine calls :meth:`_vote`."""
        assembly = self._assembly
        self._session.look()
        with self._session.deferred():
            self._run.step(
                self._batches,
                most=lambda: self._most,
                more={"groups": len(assembly.members), "generation": assembly.number},
            )
        self._committed = self._engine.loader.state_dict()
        self._phase = CHECK
        self._late = Counter(self._engine.traffic.by_kind()) - self._counted
        self._run.beat.at(self._engine.global_steps, BETWEEN_STEPS, self._run.config.training.step_timeout)

    def _vote(self) -> None:
        """Tell what this rank measured, and wait until all groups have finished their
        reductions.
        """
        run = self._run
        session, signals, sent = self._session, run.signals, Counter(self._engine.traffic.by_kind())
        sent.update(self._late)
        measured = row(signals.received, run.meter.memory_now(), sent)
        decision = session.vote([signals.seconds > LEAVE_SECONDS, *measured])
        self._counted = Counter(self._engine.traffic.by_kind())
        told = [Told(signal, leaves) for leaves, signal, *_ in decision.facts]
        can_go_on = lambda left: not lost_units(session.layout, left)  # noqa: E731
        self._stop = decide(told, self._assembly.slots, session.ranks, can_go_on)
        _, _, *most = (max(column) for column in zip(*decision.facts, strict=True))
        self._most = [self._stop.signal, *most]
        self._newcomers = decision.newcomers

    def _evaluate(self, *, is_last: bool) -> None:
        run = self._run
        line = self._together(lambda: run.evaluate(is_last=is_last), defers=True)
        run.beat.at(self._engine.global_steps, BETWEEN_STEPS, run.config.training.step_timeout)
        before, self._last_evaluated = self._last_evaluated, line["step"]
        if line["step"] == before or (run.files is not None and line["step"] in evaluated_steps(run.dump_dir)):
            return  # another group was lost after the line had been written
        run.tell_evaluation({**line, "groups": len(self._assembly.members)})

    def _resume(self) -> None:
        """Load the newest checkpoint together, and again if a group was lost meanwhile."""
        while self._assembly.is_start:
            try:
                self._is_resumed = self._session.take_state(self._run.checkpoints.resume, self._first_phase)
                break
            except StepAbortedError:
                self._meet()
        else:
            return  # others had loaded it, and gave their state to this group
        self._committed = self._engine.loader.state_dict()
        self._phase = self._first_phase()
        self._meet()  # the coordinator learns the step

    def _first_phase(self) -> int:
        return (STEP if self._is_round_start else INNER) if self._engine.global_steps else EVALUATE

    # -- meetings ----------------------------------------------------------------------------------

    @property
    def _assembly(self) -> Assembly:
        assert self._session.assembly is not None
        return self._session.assembly

    def _meet(self) -> None:
        """Meet the living groups, and go on together with what comes first for any of them."""
        run, engine = self._run, self._engine
        run.beat.at(engine.global_steps, MEETING, None)
        self._newcomers, self._stop, self._must_meet = False, Outcome(), False
        self._late.clear()
        self._drop_the_step()
        before, is_silent = self._session.assembly, self._files.is_silent
        assembly = self._session.meet(self._phase, self._begin_again)
        # Units from a checkpoint change the model, so what follows the step is done again.
        self._phase = EVALUATE if self._session.has_lost_units else assembly.phase
        self._committed = engine.loader.state_dict()
        self._batches = iter(engine.loader)
        run.follow_layout()
        if before is not None:
            self._after_meeting(before, assembly)
        if not run.steps:
            run.set_last_step(engine.global_steps)
        self._is_start = self._is_start or assembly.is_start
        if not (assembly.is_start and self._resumes):  # a checkpoint comes before the files
            truncate_after = engine.global_steps if self._is_resumed else -1
            self._files.follow_writer(truncate_after, is_first=self._is_start, is_silent=is_silent)
            self._is_start = False

    def _begin_again(self) -> None:
        """Drop the present step, and take over the signal to stop from ranks that know it.
        Collective.

        If the coordinator dies while it tells a decision, only some ranks know what was agreed.
        """
        self._drop_the_step()
        self._run.stop_signal = max(gather_json(self._run.stop_signal))

    def _drop_the_step(self) -> None:
        """Forget a step that was not committed. Its samples will be read again."""
        self._engine.forget_micro_batches()
        if self._committed is not None:
            self._engine.loader.load_state_dict(self._committed)

    # -- the end -----------------------------------------------------------------------------------

    def _leave(self) -> int:
        """Leave the run, which goes on without this group. Returns the exit code."""
        number = self._run.signals.received or signal.SIGTERM
        name = signal.Signals(number).name
        log.warning("group %d left the run after step %d (%s)", self._session.slot, self._engine.global_steps, name)
        self._files.close()
        self._session.leave_early()
        return 128 + number

    def _end(self, seconds: float) -> int:
        """End together, and return the exit code."""
        run, status = self._run, 0
        run.tell_end()
        if run.is_stopped_early:
            status = self._calibrated(lambda: self._session.protect(run.stop_early))
        else:
            self._session.protect(lambda: run.finish(seconds))
        self._session.finish()
        return status
