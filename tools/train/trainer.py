"""The training loop: the engine calls of a user's own script, with evaluation and saving."""

from __future__ import annotations

import logging
import time

from ...engine.errors import SpikeError
from .loop.training_run import TrainingRun

log = logging.getLogger("sdp")


class Trainer:
    """The loop of one rank over the steps of ``run``."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._returned_to, self._returns = -1, 0  # the step of the newest rollback's target, rollbacks to it in a row

    def train(self, *, resume: bool) -> int:
        """Run to the last step, from the newest checkpoint if ``resume``. Returns the exit code."""
        run, engine = self._run, self._run.engine
        resumed = run.begin_served() if run.service is not None else resume and run.checkpoints.resume()
        start = engine.global_steps
        run.write_start(engine.layout.placement, resume=resume, resumed=resumed)
        run.end_with_shortest_path()
        run.announce(start)
        run.tell_start(start)
        started = time.perf_counter()
        with run.signals.caught():
            if start == 0:
                run.evaluate_and_tell()
            self._save_for_rollback(start)
            batches = iter(engine.loader)
            while engine.global_steps < run.steps and not run.stop_signal:
                try:
                    run.step(batches)
                except SpikeError as spike:
                    self._roll_back(spike)
                    batches = iter(engine.loader)
                    continue
                self._evaluate_and_save_if_due()
                if run.service is not None and run.service.is_renewed:  # the rest of its data was dealt to others
                    batches, run.service.is_renewed = iter(engine.loader), False
            run.checkpoints.settle(block=True)
            run.tell_end()
            if run.is_stopped_early:
                return run.stop_early()
        run.finish(time.perf_counter() - started)
        return 0

    # -- spikes ------------------------------------------------------------------------------------

    def _save_for_rollback(self, start: int) -> None:
        """Write a checkpoint of the first weights, so that a rollback always has a target."""
        if start == 0 and self._run.config.training.on_spike == "rollback":
            self._run.checkpoints.save()

    def _roll_back(self, spike: SpikeError) -> None:
        """Return to the newest checkpoint, and go on with the data that follows the spike.
        Collective.

        Raises SpikeError if the policy is "stop", if there is no checkpoint, or if more rollbacks
        than ``training.max_skips`` ended at the same checkpoint.
        """
        run, engine, training = self._run, self._run.engine, self._run.config.training
        rollbacks = engine.spikes.rollbacks + 1
        if training.on_spike == "stop":
            run.checkpoints.settle(block=True)
            raise SpikeError(f"{spike}; the last checkpoint: {run.checkpoints.newest()}") from None
        if not run.checkpoints.roll_back():
            raise SpikeError(f"{spike}; there is no checkpoint to return to") from None
        self._returns = self._returns + 1 if engine.global_steps == self._returned_to else 1
        self._returned_to = engine.global_steps
        if self._returns > training.max_skips:
            raise SpikeError(
                f"{spike}, and {training.max_skips} rollbacks to step {engine.global_steps} did not help "
                "(training.max_skips); lower the learning rate, or resume from an earlier checkpoint"
            ) from None
        engine.spikes.rollbacks = rollbacks
        if run.files is not None:
            log.warning("%s: back to step %d, with the data that follows", spike, engine.global_steps)
        for observer in run.observers:
            observer.on_rollback(engine.global_steps)

    # -- between steps -----------------------------------------------------------------------------

    def _evaluate_and_save_if_due(self) -> None:
        run, engine = self._run, self._run.engine
        training, step = run.config.training, engine.global_steps
        run.checkpoints.settle(block=False)
        is_last = step == run.steps
        evaluates = run.evaluator.is_due(step, is_last=is_last)
        due = training.save_every and (is_last or step % training.save_every == 0)
        if evaluates or due or run.stop_signal:
            run.record(run.lines.finished())
        if run.stop_signal and not is_last:
            return  # the process is killed soon: save now, and evaluate after the resume
        if evaluates:
            run.evaluate_and_tell(is_last=is_last)
        # The checkpoint of a skipped step must not push out a good one.
        if due and not engine.was_step_skipped:
            run.checkpoints.save()
