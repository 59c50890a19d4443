"""The training loop of an elastic run with local steps (``sdp.sync``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...engine.elastic.coordination.assembly import Assembly, Decision
from ...engine.elastic.living import lost_units
from ...engine.elastic.session import Session
from .elastic import AGREE, BETWEEN_STEPS, COPY, ElasticTrainer
from .elastic_rows import Rows
from .loop.training_run import TrainingRun
from .stopping import LEAVE_SECONDS, LeavesError, Outcome, Told, decide

T = TypeVar("T")

# Parts of a round: groups agree, and wait for frozen copies.
AVERAGE, COPYING = "average", "copying weights"


class RoundsTrainer(ElasticTrainer):
    """The loop of one rank over the steps of ``run``, with local steps.

    Groups do not notice each other inside a round. All agree when an average, an evaluation or a
    checkpoint is due, and vote once more after each of the latter.

    Args:
        run: see :class:`~sdp.tools.train.elastic.ElasticTrainer`.
        session: as there.
        resume: as there.
    """

    def __init__(self, run: TrainingRun, session: Session, *, resume: bool):
        super().__init__(run, session, resume=resume)
        assert session.rounds is not None and run.config.sdp.sync is not None
        self._rounds, self._every, self._rows = session.rounds, run.config.sdp.sync.every, Rows(run)
        session.rows = self._rows.untold

    @property
    def _is_round_start(self) -> bool:
        return self._rounds.steps_alone == 0

    def _checks(self, step: int) -> bool:
        """Return whether holders, which only averages make equal, are compared after ``step``."""
        interval = self._run.config.sdp.check_interval
        return bool(interval and self._is_round_start and step // interval > max(0, step - self._every) // interval)

    def _together(self, action: Callable[[], T], *, defers: bool = False) -> T:
        """Return what ``action`` returns, if all groups do it.

        Without a vote, a group that went on would make many steps before it notices that another
        one has to repeat the action.
        """
        result = super()._together(action, defers=defers)
        self._note(self._session.vote([False, 0], self._phase))
        return result

    def _note(self, decision: Decision) -> None:
        self._newcomers = self._newcomers or decision.newcomers
        self._must_meet = len(decision.facts) < self._engine.world_size

    def _copy(self) -> None:
        """Wait until frozen copies are right, because no later step of the round notices a
        loss.
        """
        engine = self._engine
        if self._is_round_start and engine.layout.keeps_frozen:
            self._run.beat.at(engine.global_steps, COPYING, self._run.config.training.step_timeout)
            self._together(lambda: engine.frozen_here, defers=True)
            self._rows.count_late()

    def _step(self) -> None:
        """Make a step of this group, which no other group takes part in."""
        self._session.look_for_cut()
        self._run.step(self._batches, most=self._rows.begin())
        self._rows.end()
        self._committed = self._engine.loader.state_dict()
        self._phase = AGREE
        self._run.beat.at(self._engine.global_steps, BETWEEN_STEPS, self._run.config.training.step_timeout)

    def _agree(self, must_agree: bool, *, is_last: bool) -> None:
        """Tell each other what happened since all groups agreed last, and average if that is due.

        Args:
            must_agree: whether more follows that all groups do together.
            is_last: whether the run ends with this step.
        """
        rounds, run, engine = self._rounds, self._run, self._engine
        if not rounds.untold or not (must_agree or rounds.is_due(is_last=is_last)):
            return
        run.beat.at(engine.global_steps, AVERAGE, run.config.training.step_timeout * self._every)
        with self._session.deferred():
            averaged = rounds.agree(self._vote_for_round, is_last=is_last)
        self._rows.settle(self._stop.signal)
        self._rows.count_late()
        self._tell_lines(averaged=averaged)
        self._phase = COPY
        if self._session.slot in self._stop.leaving:
            raise LeavesError
        if self._stop.leaving:
            self._meet()

    def _vote_for_round(self) -> None:
        """Vote when all reductions are done."""
        session, signals, assembly = self._session, self._run.signals, self._assembly
        self._rows.tell()
        decision = session.vote([signals.seconds > LEAVE_SECONDS, signals.received], self._phase)
        self._note(decision)
        told = [Told(signal, leaves) for leaves, signal in decision.facts]
        stop = decide(told, assembly.slots, session.ranks, lambda left: not lost_units(session.layout, left))
        is_due = self._rounds.is_due(is_last=self._engine.global_steps == self._run.steps)
        self._stop = stop if is_due else Outcome(stop.signal)  # a group leaves when its round has counted

    def _tell_lines(self, *, averaged: bool) -> None:
        """Show the lines of the steps about which all groups have exchanged their rows."""
        run, training, assembly = self._run, self._engine.local_training, self._assembly
        more = {
            "groups": len(assembly.members),
            "generation": assembly.number,
            "skipped_samples": training.skipped_samples,
        }
        for line, signal_received in run.lines.finished():
            is_newest = line["step"] == self._engine.global_steps
            run.record([({**line, **(training.metrics() if averaged and is_newest else {})}, signal_received)], more)

    def _after_meeting(self, before: Assembly, now: Assembly) -> None:
        """Count the samples that lost groups read in an unfinished round, and print the number."""
        self._tell_given_up()
        stayed = [member.slot for member in now.members if not member.fresh]
        samples = self._engine.train_batch_size() // self._engine.layout.mesh.sdp
        steps = self._rounds.steps_alone
        skipped = self._rounds.note_losses(before.slots, stayed, samples)
        if skipped:
            gone = ", ".join(map(str, sorted({*before.slots} - {*stayed})))
            self._tell_skipped(skipped, f"group{'s' * (',' in gone)} {gone}", steps)

    def _tell_given_up(self) -> None:
        """Show the lines of the steps of a round that all gave up, and say how many samples it
        had.
        """
        if self._rounds.told:
            self._rows.take(self._rounds.told)
            self._rounds.told = []
            self._rows.settle(0)
            self._tell_lines(averaged=False)
        if (given_up := self._rounds.given_up) is not None:
            self._rounds.given_up = None
            groups = ", ".join(map(str, given_up.groups))
            self._tell_skipped(given_up.samples, f"groups {groups}", given_up.steps)

    def _tell_skipped(self, samples: int, groups: str, steps: int) -> None:
        self._session.tell(
            f"{samples} samples of {groups} in the {steps} steps of an unfinished round are skipped; their changes "
            "are lost"
        )
