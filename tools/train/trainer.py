"""The training loop: the engine calls of a user's own script, with evaluation and saving.

Everything that only watches the loop is an observer, see ``observers/observer.py``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.batch.call import loss_of, to_device
from ...engine.config.schema import Config
from ...engine.engine import SDPEngine
from ...engine.errors import NonFiniteError, SpikeError
from ...launcher.heartbeat import Heartbeat
from ..runs.dataset import Corpus
from ..runs.run_files import RunFiles
from ..tasks.harness import LoadedTasks
from .checkpointer import Checkpointer
from .evaluator import Evaluator
from .meter import StepFacts, StepLines, StepMeter
from .observers.observer import Observer
from .observers.probe import MemoryProbe
from .process.stop_signals import StopSignals
from .summary import rank_facts, write_summary
from .utilisation import Utilisation

log = logging.getLogger("sdp")


class Trainer:
    """One rank of a run.

    Args:
        config: the configuration, in the form that is written to config.json.
        engine: what ``sdp.initialize`` returned.
        corpus: training and held-out data.
        dump_dir: the directory of the run's files.
        baseline: bytes of memory that this process had before the model existed.
        beat: the heartbeat, which is told what this rank does next.
        files: the run's files on rank 0, None on other ranks.
        observers: the observers of the loop on this rank.
        tasks: the tasks of ``training.evaluate_tasks`` on rank 0, None on other ranks.
    """

    def __init__(
        self,
        config: Config,
        engine: SDPEngine,
        corpus: Corpus,
        dump_dir: Path,
        *,
        baseline: int,
        beat: Heartbeat,
        files: RunFiles | None,
        observers: Sequence[Observer],
        tasks: LoadedTasks | None = None,
    ):
        self.config, self.engine, self.corpus, self.dump_dir = config, engine, corpus, dump_dir
        self.baseline, self.beat, self.files, self.observers = baseline, beat, files, observers
        self.evaluator = Evaluator(engine, corpus, beat, tasks)
        self.checkpoints = Checkpointer(engine, dump_dir, corpus.identity, self.evaluator.recalibrated, beat)
        self.meter = StepMeter(engine, beat)
        self.lines = StepLines(engine, Utilisation(engine, config.data.sequence_length), self.meter)
        self.signals = StopSignals()
        self.steps = 0  # the last step of the run
        self.stop_signal = 0  # the signal for which all ranks agreed to stop
        self.last_step: StepFacts | None = None
        self._returned_to, self._returns = -1, 0  # the step of the newest rollback's target, rollbacks to it in a row

    def train(self, *, resume: bool) -> int:
        """Run to the last step, from the newest checkpoint if ``resume``. Returns the exit code."""
        resumed = resume and self.checkpoints.resume()
        start = self.engine.global_steps
        self._write_start(truncate_after=start if resumed else -1 if resume else None)
        self.steps = self._last_step(start)
        self._announce(start)
        for observer in self.observers:
            observer.on_start(start, self.steps)
        started = time.perf_counter()
        with self.signals.caught():
            if start == 0:
                self._evaluate()
            self._save_for_rollback(start)
            batches = iter(self.engine.loader)
            while self.engine.global_steps < self.steps and not self.stop_signal:
                try:
                    self._step(batches)
                except SpikeError as spike:
                    self._roll_back(spike)
                    batches = iter(self.engine.loader)
                    continue
                self._evaluate_and_save_if_due()
            self.checkpoints.settle(block=True)
            for observer in self.observers:
                observer.on_end()
            if self.stop_signal and self.engine.global_steps < self.steps:
                return self._stop_early()
        self._finish(time.perf_counter() - started)
        return 0

    def close(self) -> None:
        """Close what the observers have open. Called once, also when the run fails."""
        for observer in self.observers:
            # A write that failed before fails again here. It was reported then.
            with contextlib.suppress(OSError):
                observer.close()

    # -- one step ----------------------------------------------------------------------------------

    def _step(self, batches: Iterator[Any]) -> None:
        self.meter.begin()
        compute: Callable[[], None] = partial(self._compute, batches)
        for observer in self.observers:
            compute = partial(observer.around_step, self.engine.global_steps + 1, compute)
        try:
            compute()
        except NonFiniteError as error:
            self._record(self.lines.finished())
            self.checkpoints.settle(block=True)
            raise NonFiniteError(f"{error}; the last good one: {self.checkpoints.newest()}") from None
        self.last_step = self.meter.end()
        self._begin_line(self.last_step)
        self._record(self.lines.finished(except_newest=self.engine.local_training.lag))

    def _compute(self, batches: Iterator[Any]) -> None:
        """Forward, backward and update over the micro-batches of one optimizer step."""
        engine, part = self.engine, self.meter.part
        for _ in range(engine.gradient_accumulation_steps()):
            with part("data"):
                batch = to_device(next(batches), engine.device)
            with part("forward"):
                loss = loss_of(engine(batch))
            with part("backward"):
                engine.backward(loss)
            with part("optimizer"):
                engine.step()
        if engine.global_steps == self.steps:
            with part("optimizer"):
                engine.finish_round()

    def _begin_line(self, facts: StepFacts) -> None:
        self.lines.begin(facts, self.meter.elapsed(), self.signals.received)

    def _record(self, lines: Iterable[tuple[dict[str, Any], int]]) -> None:
        """Show lines of metrics.jsonl to the observers.

        The ranks also agree here to stop, if any of them received a signal.
        """
        for line, signal_received in lines:
            self.stop_signal = self.stop_signal or signal_received
            for observer in self.observers:
                observer.on_step(line)

    # -- spikes ------------------------------------------------------------------------------------

    def _save_for_rollback(self, start: int) -> None:
        """Write a checkpoint of the first weights, so that a rollback always has a target."""
        if start == 0 and self.config.training.on_spike == "rollback":
            self.checkpoints.save()

    def _roll_back(self, spike: SpikeError) -> None:
        """Return to the newest checkpoint, and go on with the data that follows the spike.
        Collective.

        Raises SpikeError if the policy is "stop", if there is no checkpoint, or if more rollbacks
        than ``training.max_skips`` ended at the same checkpoint.
        """
        engine, training = self.engine, self.config.training
        rollbacks = engine.spikes.rollbacks + 1
        if training.on_spike == "stop":
            self.checkpoints.settle(block=True)
            raise SpikeError(f"{spike}; the last checkpoint: {self.checkpoints.newest()}") from None
        if not self.checkpoints.roll_back():
            raise SpikeError(f"{spike}; there is no checkpoint to return to") from None
        self._returns = self._returns + 1 if engine.global_steps == self._returned_to else 1
        self._returned_to = engine.global_steps
        if self._returns > training.max_skips:
            raise SpikeError(
                f"{spike}, and {training.max_skips} rollbacks to step {engine.global_steps} did not help "
                "(training.max_skips); lower the learning rate, or resume from an earlier checkpoint"
            ) from None
        engine.spikes.rollbacks = rollbacks
        if self.files is not None:
            log.warning("%s: back to step %d, with the data that follows", spike, engine.global_steps)
        for observer in self.observers:
            observer.on_rollback(engine.global_steps)

    # -- between steps -----------------------------------------------------------------------------

    def _evaluate_and_save_if_due(self) -> None:
        training, step = self.config.training, self.engine.global_steps
        self.checkpoints.settle(block=False)
        is_last = step == self.steps
        evaluates = self.evaluator.is_due(step, is_last=is_last)
        due = training.save_every and (is_last or step % training.save_every == 0)
        if evaluates or due or self.stop_signal:
            self._record(self.lines.finished())
        if self.stop_signal and not is_last:
            return  # the process is killed soon: save now, and evaluate after the resume
        if evaluates:
            self._evaluate(is_last=is_last)
        # The checkpoint of a skipped step must not push out a good one.
        if due and not self.engine.was_step_skipped:
            self.checkpoints.save()

    def _evaluate(self, *, is_last: bool = False) -> None:
        found = self.evaluator.evaluate(is_last=is_last)
        line = {"step": self.engine.global_steps, "tokens": self._tokens, **found}
        for observer in self.observers:
            observer.on_evaluation(line)

    # -- start and end -----------------------------------------------------------------------------

    def _write_start(self, truncate_after: int | None) -> None:
        """Write the files that describe the run.

        A resume that fails before this leaves the run unchanged.
        """
        if self.files is not None:
            if truncate_after is not None:
                self.files.truncate_after(truncate_after)
            self.files.write_config(self.config)
            self.files.write_placement(self.engine.layout.placement)

    def _last_step(self, start: int) -> int:
        training = self.config.training
        tokens_left = (training.tokens or 0) - self._tokens
        return training.steps or start + max(0, math.ceil(tokens_left / self._tokens_per_step))

    def _announce(self, start: int) -> None:
        if self.files is None:
            return
        engine, config = self.engine, self.config
        parameters = sum(info.numel for info in engine.layout.parameters.values())
        log.info(
            "model: %s, %.2f M parameters; data: %s", config.model["name"], parameters / 1e6, self.corpus.description
        )
        kind = "tokens" if config.data.name is None else "images"
        log.info("training: steps %d to %d, %s %s a step", start + 1, self.steps, f"{self._tokens_per_step:,}", kind)
        if any(end >= self.steps for end in config.masking_schedule.ends):
            log.warning("sdp.masking: %s, but the run ends with step %d", config.masking_schedule, self.steps)
        if engine.world_size > 1:
            log.info("bytes sent between groups by this rank in a step: %s", engine.traffic_formula())
            span = "step" if config.sdp.sync is None else f"round of {config.sdp.sync.every} steps"
            schedule = config.masking_schedule
            phases = {f"{span} with {schedule.at(first)} masking": first for first in schedule.starts}
            for what, step in phases.items() if schedule.ends else [(span, None)]:
                self._announce_traffic(what, step)
        if not MemoryProbe.works_with(engine):
            log.info("peak of live tensors: not measured, because the probe cannot see compiled code on a CPU")

    def _announce_traffic(self, what: str, step: int | None) -> None:
        by_kind = self.engine.planned_traffic(step).by_kind().items()
        planned = ", ".join(f"{kind.replace('/', ' ')} {sent:,}" for kind, sent in by_kind)
        more = "; plus activations between tensor-parallel ranks" if self.engine.layout.mesh.tp > 1 else ""
        log.info("bytes sent by this rank in a %s, planned: %s%s", what, planned, more)

    def _stop_early(self) -> int:
        self.checkpoints.write()
        log.info(
            "stopped by %s after step %d, with a checkpoint",
            signal.Signals(self.stop_signal).name,
            self.engine.global_steps,
        )
        return 128 + self.stop_signal

    def _finish(self, seconds: float) -> None:
        engine = self.engine
        self.beat.at(engine.global_steps, "the end", None)
        peak = next((each.peak for each in self.observers if isinstance(each, MemoryProbe)), None)
        ranks = engine.gather_facts(rank_facts(engine, self.last_step, self.meter.sent_per_step(), self.baseline, peak))
        if self.files is not None:
            write_summary(self.files, engine, self.corpus, ranks, seconds)

    @property
    def _tokens(self) -> int:
        """Count the tokens trained on since the start of the run, whatever the batch sizes were."""
        return self.engine.global_samples * self.config.data.tokens_per_sample

    @property
    def _tokens_per_step(self) -> int:
        return self.engine.train_batch_size() * self.config.data.tokens_per_sample
