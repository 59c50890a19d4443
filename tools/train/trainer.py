"""The training loop of one rank. It makes the same engine calls as a user's own script.

It also evaluates and saves. Code that only watches the loop is an observer (``observer.py``).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...engine.batch.call import loss_of, to_device
from ...engine.batch.sampler import PathSampler
from ...engine.checkpoint.storage.remote import describe_newest
from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import Heartbeat
from ...engine.engine import SDPEngine
from ...engine.errors import NonFiniteError, SpikeError
from ...launcher.signals import caught_signals
from ...models.registry import vocabulary_of
from ..runs.dataset import Corpus
from ..runs.run_files import RunFiles
from ..runs.start_files import keep_start_files
from .loop.checkpointer import Checkpointer
from .loop.evaluator import Evaluator
from .loop.meter import StepFacts, StepLines, StepMeter, Utilisation
from .loop.summary import run_summary, write_summary
from .observer import MemoryProbe, Observer

log = logging.getLogger("sdp")

# Activities that the heartbeat reports.
THE_END, WRITING = "the end", "writing lines"


class Trainer:
    """Trains a model on one rank, evaluates it and saves checkpoints. :meth:`train` does all this.

    Args:
        config: the configuration, as it is written to config.json.
        engine: the engine that ``sdp.initialize`` returned.
        corpus: training and held-out data.
        dump_dir: the directory of the run's files.
        checkpoints: the directory of the checkpoints, or its URL in an object store.
        baseline: bytes of memory that this process had before the model existed.
        beat: the heartbeat of this rank.
        files: the run's files on the rank that writes them, None on other ranks.
        observers: the observers of the loop on this rank.
    """

    def __init__(
        self,
        config: Config,
        engine: SDPEngine,
        corpus: Corpus,
        dump_dir: Path,
        checkpoints: str | Path,
        *,
        baseline: int,
        beat: Heartbeat,
        files: RunFiles | None = None,
        observers: Sequence[Observer] = (),
    ):
        self._config, self._engine, self._corpus, self._dump_dir = config, engine, corpus, dump_dir
        self._beat, self._files, self._observers, self._baseline = beat, files, observers, baseline
        self._meter = StepMeter(engine, beat)
        self._lines = StepLines(engine, Utilisation(engine, config.data.sequence_length), self._meter)
        self._signals = list[int]()  # that this rank received; they end the run after the step, with a checkpoint
        self._service = engine.local_training.service  # of a run with sdp.sync.service, else None
        self._steps = config.training.steps or 0 if self._service is None else self._service.schedule.steps
        self._stop_signal = 0  # the signal for which all ranks agreed to stop
        self._last_facts: StepFacts | None = None  # measurements of this rank in the last step
        self._returned_to, self._returns = -1, 0  # the step that rollbacks returned to, and how often in a row
        self._evaluator = Evaluator(engine, corpus, beat)
        self._checkpoints = Checkpointer(
            engine, dump_dir, checkpoints, corpus.identity, self._evaluator.recalibrated, beat
        )

    def train(self, *, resume: bool) -> int:
        """Run to the last step, and return the exit code. Collective.

        With ``resume``, the run continues from its newest checkpoint.
        """
        engine, training = self._engine, self._config.training
        resumed = self._begin_served() if self._service is not None else resume and self._checkpoints.resume()
        start = engine.global_steps
        if self._files is not None:
            self._write_start(self._files, resume=resume, resumed=resumed)
        self._end_with_shortest_path()
        if self._files is not None:
            self._announce(start)
        for observer in self._observers:
            observer.on_start(start, self._steps)
        started = time.perf_counter()
        with caught_signals() as self._signals:
            if start == 0:
                self._evaluate()
                if training.on_spike == "rollback":
                    self._checkpoints.save()  # so that a rollback always has a target
            batches = iter(engine.loader)
            while engine.global_steps < self._steps and not self._stop_signal:
                try:
                    self._step(batches)
                except SpikeError as spike:
                    self._roll_back(spike)
                    batches = iter(engine.loader)
                    continue
                self._checkpoints.settle(block=False)
                step = engine.global_steps
                is_last = step == self._steps
                evaluates = self._evaluator.is_due(step, is_last=is_last)
                saves = training.save_every and (is_last or step % training.save_every == 0)
                if evaluates or saves or self._stop_signal:
                    self._record()
                if self._stop_signal and not is_last:
                    break  # the process is killed soon: save now, and evaluate after the resume
                if evaluates:
                    self._evaluate(is_last=is_last)
                # The checkpoint of a skipped step must not replace a good one.
                if saves and not engine.was_step_skipped:
                    self._checkpoints.save()
                if self._service is not None and self._service.is_renewed:  # other groups got its data
                    batches, self._service.is_renewed = iter(engine.loader), False
            self._checkpoints.settle(block=True)
            self._beat.at(engine.global_steps, WRITING, training.step_timeout)
            for observer in self._observers:
                observer.on_end()
            if self._stop_signal and engine.global_steps < self._steps:
                if self._service is None:
                    self._checkpoints.write()
                else:
                    self._service.leave()
                self._beat.at(engine.global_steps, THE_END, None)
                name, saved = signal.Signals(self._stop_signal).name, ", with a checkpoint" * (self._service is None)
                log.info("stopped by %s after step %d%s", name, engine.global_steps, saved)
                return 128 + self._stop_signal
        self._finish(time.perf_counter() - started)
        return 0

    def close(self) -> None:
        """Close the files of the observers. Called once, even if the run fails."""
        for observer in self._observers:
            # A write that failed before fails again here. It was reported then.
            with contextlib.suppress(OSError):
                observer.close()

    # -- one step ----------------------------------------------------------------------------------

    def _step(self, batches: Iterator[Any]) -> None:
        """Make one optimizer step from this rank's micro-batches, and record it. Collective."""
        engine, timed = self._engine, self._meter.timed
        self._meter.begin()
        try:
            with contextlib.ExitStack() as watched:
                for observer in reversed(self._observers):
                    watched.enter_context(observer.around_step(engine.global_steps + 1))
                for _ in range(engine.gradient_accumulation_steps()):
                    with timed("data"):
                        batch = to_device(next(batches), engine.device)
                    with timed("forward"):
                        loss = loss_of(engine(batch))
                    with timed("backward"):
                        engine.backward(loss)
                    with timed("optimizer"):
                        engine.step()
                if engine.global_steps == self._steps:
                    with timed("optimizer"):
                        engine.finish_round()
        except NonFiniteError as error:
            self._record()
            self._checkpoints.settle(block=True)
            newest = describe_newest(self._checkpoints.directory)
            raise NonFiniteError(f"{error}; the newest checkpoint: {newest}") from None
        is_first, self._last_facts = self._last_facts is None, self._meter.end()
        if is_first and self._files is not None and self._last_facts.comm:
            sent = Counter[str]()
            for kind, nbytes in self._last_facts.comm.items():
                sent[kind.partition("/")[0]] += nbytes
            listed = ", ".join(f"{nbytes:,} {'for ' * (scope == 'control')}{scope}" for scope, nbytes in sent.items())
            log.info("bytes sent by this rank in step %d: %s", engine.global_steps, listed)
        self._lines.begin(self._last_facts, self._meter.elapsed(), self._signals[-1] if self._signals else 0)
        self._record(except_newest=engine.local_training.lag)

    def _record(self, *, except_newest: int = 0) -> None:
        """Write the finished lines of metrics.jsonl, and show them to the observers. Collective.

        The ranks also agree here to stop, if any of them received a signal.
        """
        self._beat.at(self._engine.global_steps, WRITING, self._config.training.step_timeout)
        for line, signal_received in self._lines.finished(except_newest=except_newest):
            self._stop_signal = self._stop_signal or signal_received
            if self._files is not None:
                self._files.step(line)
            for observer in self._observers:
                observer.on_step(line)

    def _evaluate(self, *, is_last: bool = False) -> None:
        """Evaluate, write a line of evaluations.jsonl, and show it to the observers. Collective.

        With a service, one of the groups evaluates.
        """
        engine, service = self._engine, self._service
        if service is not None and not service.claim(engine.global_steps):
            return
        found = self._evaluator.evaluate(is_last=is_last)
        tokens = engine.global_samples * self._config.data.tokens_per_sample  # of all batch sizes of the run
        line = {"step": engine.global_steps, "tokens": tokens, **found}
        if service is not None and not service.report(line):
            log.warning("the evaluation of step %d is lost, because the service dropped this group", line["step"])
            return
        if self._files is not None:
            self._files.evaluation(line)
        for observer in self._observers:
            observer.on_evaluation(line)

    def _roll_back(self, spike: SpikeError) -> None:
        """Return to the newest checkpoint, and go on with the data after the spike. Collective.

        Raises SpikeError if the policy is "stop", if there is no checkpoint, or if more rollbacks
        than ``training.max_skips`` ended at the same checkpoint.
        """
        engine, training = self._engine, self._config.training
        rollbacks = engine.spikes.rollbacks + 1
        if training.on_spike == "stop":
            self._checkpoints.settle(block=True)
            raise SpikeError(f"{spike}; the last checkpoint: {describe_newest(self._checkpoints.directory)}") from None
        if not self._checkpoints.roll_back():
            raise SpikeError(f"{spike}; there is no checkpoint to return to") from None
        self._returns = self._returns + 1 if engine.global_steps == self._returned_to else 1
        self._returned_to = engine.global_steps
        if self._returns > training.max_skips:
            raise SpikeError(
                f"{spike}, and {training.max_skips} rollbacks to step {engine.global_steps} did not help "
                "(training.max_skips); lower the learning rate, or resume from an earlier checkpoint"
            ) from None
        engine.spikes.rollbacks = rollbacks
        if self._files is not None:
            log.warning("%s: back to step %d; the data goes on after the spike", spike, engine.global_steps)
            self._files.truncate_after(engine.global_steps)
        for observer in self._observers:
            observer.on_rollback(engine.global_steps)

    # -- the start and the end ---------------------------------------------------------------------

    def _write_start(self, files: RunFiles, *, resume: bool, resumed: bool) -> None:
        """Write the files that describe the run. A resume that fails before this changes no file.

        ``resume`` says whether the files of an earlier run continue, and ``resumed`` whether that
        run had a checkpoint.
        """
        if resume and self._service is None:
            files.restart(self._engine.global_steps)
            files.truncate_after(self._engine.global_steps if resumed else -1)
        files.write_config(self._config)
        if not resumed:
            keep_start_files(self._config, self._dump_dir)
        files.write_placement(self._engine.layout.placement)

    def _end_with_shortest_path(self) -> None:
        """End the run where a path has no more data, if ``sdp.paths.on_short`` says so."""
        paths, sampler = self._config.sdp.paths, getattr(self._engine.loader, "sampler", None)
        if paths is None or paths.on_short != "end" or not isinstance(sampler, PathSampler):
            return
        samples, path = min((samples, path) for path, samples in enumerate(sampler.samples_of_paths))
        last = samples * sampler.paths // self._engine.train_batch_size()
        if last < self._steps:
            log.info("sdp.paths.on_short: path %d has no more sequences after step %d: the run ends", path, last)
            self._steps = last

    def _begin_served(self) -> bool:
        """Begin with the anchors of the service. Collective. Returns whether the run has begun."""
        engine, corpus = self._engine, self._corpus
        self._service.start = {
            "micro_batches": engine.gradient_accumulation_steps(),
            "width": engine.train_micro_batch_size_per_gpu() * engine.dp_world_size,
            "data_ranks": engine.dp_world_size,
            "data": " ".join([corpus.sha256, corpus.identity.get("router", "")]),
        }
        steps = engine.local_training.enter()
        engine.go_on_after(steps, samples=0, skipped=0)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step(steps - 1)
        return steps > 0

    def _announce(self, start: int) -> None:
        engine, config = self._engine, self._config
        parameters = sum(info.numel for info in engine.layout.parameters_at(0).values())
        log.info(
            "model: %s, %.2f M parameters; data: %s", config.model["name"], parameters / 1e6, self._corpus.description
        )
        tokens = self._corpus.facts.get("vocab_size")
        rows = 0 if tokens is None else vocabulary_of(engine.module)
        if tokens is not None and rows > tokens:
            log.info("model: %d of the model's %d tokens are padding: the tokenizer lacks them", rows - tokens, rows)
        kind = "tokens" if config.data.name is None else "images"
        count = engine.train_batch_size() * config.data.tokens_per_sample
        log.info("training: steps %d to %d, %s %s per step", start + 1, self._steps, f"{count:,}", kind)
        if not MemoryProbe.works_with(engine):
            log.info("peak of live tensors: not measured, because the probe cannot see compiled code on a CPU")

    def _finish(self, seconds: float) -> None:
        """Write the summary of a run that trained for ``seconds``. Collective."""
        engine = self._engine
        self._beat.at(engine.global_steps, THE_END, self._config.training.start_timeout)
        peak = next((observer.peak for observer in self._observers if isinstance(observer, MemoryProbe)), None)
        facts = {
            "rank": engine.global_rank,
            "group": engine.layout.mesh.coordinates(engine.global_rank).sdp,
            "state_predicted": engine.predicted_state_bytes().to_json(),
            "state_measured": engine.measured_state_bytes().to_json(),
            "peak_memory_bytes": self._last_facts.peak_memory_bytes if self._last_facts else None,
            "baseline_memory_bytes": self._baseline,
            "peak_tensor_bytes": peak,
            "comm_bytes_per_step": self._meter.sent_per_step(),
        }
        ranks = engine.gather_facts(facts)
        if self._files is not None:
            write_summary(self._files, run_summary(engine, self._corpus, self._dump_dir, ranks, seconds))
        self._beat.at(engine.global_steps, THE_END, None)
        if self._service is not None:
            self._service.leave()
