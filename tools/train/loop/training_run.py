"""One rank's run: its engine, files and observers, and what the training loops do with them.

Everything that only watches a loop is an observer, see ``observers/observer.py``.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....engine.batch.call import loss_of, to_device
from ....engine.batch.sampler import PathSampler
from ....engine.config.schema import Config
from ....engine.distributed.heartbeat import Heartbeat
from ....engine.engine import SDPEngine
from ....engine.errors import NonFiniteError
from ....engine.placement.placement import Placement
from ....models.registry import vocabulary_of
from ...runs.dataset import Corpus
from ...runs.run_files import RunFiles
from ...runs.start_files import keep_start_files
from ...tasks.harness import LoadedTasks
from ..observers.observer import Observer
from ..observers.probe import MemoryProbe
from ..process.stop_signals import StopSignals
from .checkpointer import Checkpointer
from .evaluator import Evaluator
from .meter import StepFacts, StepLines, StepMeter
from .summary import rank_facts, write_summary
from .utilisation import Utilisation

log = logging.getLogger("sdp")

THE_END = "the end"  # a phase


class TrainingRun:
    """The parts of one rank's run: a step, an evaluation, its begin and its end.

    The training loop, ``trainer.Trainer``, decides about their order.

    Args:
        config: the configuration, in the form that is written to config.json.
        engine: what ``sdp.initialize`` returned.
        corpus: training and held-out data.
        dump_dir: the directory of the run's files.
        baseline: bytes of memory that this process had before the model existed.
        beat: the heartbeat, which is told what this rank does next.
        files: the run's files on the rank that writes them, None on other ranks.
        observers: the observers of the loop on this rank.
        tasks: the tasks of ``training.evaluate_tasks`` on rank 0, None on other ranks.

    Attributes:
        steps: the last step of the run.
        service: the group's membership in a run whose anchors a service keeps, or None.
        stop_signal: the signal for which all ranks agreed to stop, 0 if none.
        last_facts: what this rank measured in the last step.
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
        files: RunFiles | None = None,
        observers: Sequence[Observer] = (),
        tasks: LoadedTasks | None = None,
    ):
        self.config, self.engine, self.corpus, self.dump_dir = config, engine, corpus, dump_dir
        self.beat, self.files, self.observers = beat, files, list(observers)
        self._baseline = baseline
        self.meter = StepMeter(engine, beat)
        self.lines = StepLines(engine, Utilisation(engine, config.data.sequence_length), self.meter)
        self.signals, self.service = StopSignals(), engine.local_training.service
        self.steps = config.training.steps or 0 if self.service is None else self.service.schedule.steps
        self.stop_signal = 0
        self.last_facts: StepFacts | None = None
        self.evaluator = Evaluator(engine, corpus, beat, tasks)
        self.checkpoints = Checkpointer(engine, dump_dir, corpus.identity, self.evaluator.recalibrated, beat)

    def close(self) -> None:
        """Close what the observers have open. Called once, also when the run fails."""
        for observer in self.observers:
            # A write that failed before fails again here. It was reported then.
            with contextlib.suppress(OSError):
                observer.close()

    # -- the start ---------------------------------------------------------------------------------

    def write_start(self, placement: Placement, *, resume: bool, resumed: bool) -> None:
        """Write the files that describe the run.

        A resume that fails before this leaves the run unchanged.

        Args:
            placement: which group holds which unit.
            resume: whether the run goes on with the files of an earlier one.
            resumed: whether there was a checkpoint.
        """
        if self.files is not None:
            if resume and self.service is None:
                self.files.restart(self.engine.global_steps)
                self.files.truncate_after(self.engine.global_steps if resumed else -1)
            self.files.write_config(self.config)
            if not resumed:
                keep_start_files(self.config, self.dump_dir)
            self.files.write_placement(placement)

    def end_with_shortest_path(self) -> None:
        """End the run where a path has no more data, if ``sdp.paths.on_short`` says so."""
        paths, sampler = self.config.sdp.paths, getattr(self.engine.loader, "sampler", None)
        if paths is None or paths.on_short != "end" or not isinstance(sampler, PathSampler):
            return
        samples, path = min((samples, path) for path, samples in enumerate(sampler.samples_of_paths))
        last = samples * sampler.paths // self.engine.train_batch_size()
        if last < self.steps:
            log.info("sdp.paths.on_short: path %d has no more sequences after step %d, which is the last", path, last)
            self.steps = last

    def begin_served(self) -> bool:
        """Begin with the anchors of the service. Collective. Returns whether the run has begun."""
        engine, corpus = self.engine, self.corpus
        width = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        steps = engine.local_training.begin(engine.gradient_accumulation_steps(), width, corpus.sha256)
        engine.go_on_after(steps, samples=0, skipped=0)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step(steps - 1)
        return steps > 0

    def announce(self, start: int) -> None:
        """Say on the rank that writes the files what will be trained from step ``start`` on."""
        if self.files is None:
            return
        engine, config = self.engine, self.config
        parameters = sum(info.numel for info in engine.layout.parameters_at(0).values())
        log.info(
            "model: %s, %.2f M parameters; data: %s", config.model["name"], parameters / 1e6, self.corpus.description
        )
        tokens = self.corpus.facts.get("vocab_size")
        rows = 0 if tokens is None else vocabulary_of(engine.module)
        if tokens is not None and rows > tokens:
            log.info("model: %d of the model's %d tokens are padding, which the tokenizer lacks", rows - tokens, rows)
        kind = "tokens" if config.data.name is None else "images"
        log.info("training: steps %d to %d, %s %s a step", start + 1, self.steps, f"{self._tokens_per_step:,}", kind)
        if any(end >= self.steps for end in config.masking_schedule.ends):
            log.warning("sdp.masking: %s, but the run ends with step %d", config.masking_schedule, self.steps)
        if not MemoryProbe.works_with(engine):
            log.info("peak of live tensors: not measured, because the probe cannot see compiled code on a CPU")

    def tell_start(self, start: int) -> None:
        """Tell the observers that the run goes from step ``start`` to its last step."""
        for observer in self.observers:
            observer.on_start(start, self.steps)

    # -- one step ----------------------------------------------------------------------------------

    def step(self, batches: Iterator[Any]) -> None:
        """Make one optimizer step, and record its line. Collective.

        ``batches``: the micro-batches of this rank.
        """
        self.meter.begin()
        compute: Callable[[], None] = partial(self._compute, batches)
        for observer in self.observers:
            compute = partial(observer.around_step, self.engine.global_steps + 1, compute)
        try:
            compute()
        except NonFiniteError as error:
            self.record(self.lines.finished())
            self.checkpoints.settle(block=True)
            raise NonFiniteError(f"{error}; the last good one: {self.checkpoints.newest()}") from None
        is_first, self.last_facts = self.last_facts is None, self.meter.end()
        if is_first and self.files is not None and self.last_facts.comm:
            sent = Counter[str]()
            for kind, nbytes in self.last_facts.comm.items():
                sent[kind.partition("/")[0]] += nbytes
            listed = ", ".join(f"{nbytes:,} {'for ' * (scope == 'control')}{scope}" for scope, nbytes in sent.items())
            log.info("bytes sent by this rank in step %d: %s", self.engine.global_steps, listed)
        self.lines.begin(self.last_facts, self.meter.elapsed(), self.signals.received)
        self.record(self.lines.finished(except_newest=self.engine.local_training.lag))

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

    def record(self, lines: Iterable[tuple[dict[str, Any], int]]) -> None:
        """Show lines of metrics.jsonl to the observers.

        The ranks also agree here to stop, if any of them received a signal.
        """
        self.beat.at(self.engine.global_steps, "writing lines", self.config.training.step_timeout)
        for line, signal_received in lines:
            self.stop_signal = self.stop_signal or signal_received
            for observer in self.observers:
                observer.on_step(line)

    # -- an evaluation -----------------------------------------------------------------------------

    def evaluate(self, *, is_last: bool = False) -> dict[str, Any]:
        """Return the line of evaluations.jsonl for the present step. Collective."""
        found = self.evaluator.evaluate(is_last=is_last)
        return {"step": self.engine.global_steps, "tokens": self.tokens, **found}

    def evaluate_and_tell(self, *, is_last: bool = False) -> None:
        """Show a line of evaluations.jsonl to the observers. Collective.

        With a service, one of the groups evaluates.
        """
        if self.service is not None and not self.service.claim(self.engine.global_steps):
            return
        line = self.evaluate(is_last=is_last)
        if self.service is not None:
            self.service.report(line)
        for observer in self.observers:
            observer.on_evaluation(line)

    # -- the end -----------------------------------------------------------------------------------

    def tell_end(self) -> None:
        """Tell the observers that the loop has ended."""
        self.beat.at(self.engine.global_steps, "writing lines", self.config.training.step_timeout)
        for observer in self.observers:
            observer.on_end()

    @property
    def is_stopped_early(self) -> bool:
        """Whether a signal ended the loop before the last step."""
        return bool(self.stop_signal) and self.engine.global_steps < self.steps

    def stop_early(self) -> int:
        """Write a checkpoint after a signal, and return the exit code. Collective."""
        if self.service is None:
            self.checkpoints.write()
        else:
            self.service.leave()
        self.beat.at(self.engine.global_steps, THE_END, None)
        log.info(
            "stopped by %s after step %d, with a checkpoint" if self.service is None else "stopped by %s after step %d",
            signal.Signals(self.stop_signal).name,
            self.engine.global_steps,
        )
        return 128 + self.stop_signal

    def finish(self, seconds: float) -> None:
        """Write the summary of a run that trained for ``seconds``. Collective."""
        engine = self.engine
        self.beat.at(engine.global_steps, THE_END, self.config.training.start_timeout)
        peak = next((each.peak for each in self.observers if isinstance(each, MemoryProbe)), None)
        facts = rank_facts(engine, self.last_facts, self.meter.sent_per_step(), self._baseline, peak)
        ranks = engine.gather_facts(facts)
        if self.files is not None:
            write_summary(self.files, engine, self.corpus, ranks, seconds)
        self.beat.at(engine.global_steps, THE_END, None)
        if self.service is not None:
            self.service.leave()

    @property
    def tokens(self) -> int:
        """Count the tokens trained on since the start of the run, whatever the batch sizes were."""
        return self.engine.global_samples * self.config.data.tokens_per_sample

    @property
    def _tokens_per_step(self) -> int:
        return self.engine.train_batch_size() * self.config.data.tokens_per_sample
