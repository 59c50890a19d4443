"""The training loop of an elastic run: a step that a lost group spoils is made again by the
others.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...engine.config.schema import Config
from ...engine.elastic.member import RunFinishedError, StepAbortedError
from ...engine.elastic.membership import STEP
from ...engine.elastic.session import Session, UnitsLostError
from ...engine.engine import SDPEngine
from ...engine.errors import ConfigError, PeerLostError
from ...launcher.heartbeat import Heartbeat
from ..runs.dataset import Corpus
from ..runs.run_files import RunFiles, read_run
from .checkpointer import Checkpointer
from .evaluator import Evaluator
from .meter import StepFacts
from .observers.observer import Observer
from .observers.progress import Progress
from .observers.recorder import Recorder
from .trainer import Trainer

log = logging.getLogger("sdp")

# What comes next after a committed step, in this order. A group may join only before a step.
CHECK, EVALUATE, SAVE = 0, 1, 2
_KEPT_LINES = 16  # of metrics.jsonl, for the case that the group that writes them is lost
_LOCK_SECONDS = 20.0  # how long the lock of a lost group's files may last


class ElasticTrainer(Trainer):
    """One rank of an elastic run.

    Each group keeps its share of the data until a step is committed. After a loss, the living
    groups share out the samples from the last committed step on. So a sample counts once.

    Args:
        config: the configuration, in the form that is written to config.json.
        engine: what ``sdp.initialize`` returned.
        corpus: training and held-out data.
        dump_dir: the directory of the run's files.
        session: this rank's part in the meetings of groups.
        baseline: bytes of memory that this process had before the model existed.
        beat: the heartbeat, which is told what this rank does next.
        observers: the observers of the loop on this rank, without those that write files.
    """

    def __init__(
        self,
        config: Config,
        engine: SDPEngine,
        corpus: Corpus,
        dump_dir: Path,
        session: Session,
        *,
        baseline: int,
        beat: Heartbeat,
        observers: Sequence[Observer],
    ):
        super().__init__(
            config, engine, corpus, dump_dir, baseline=baseline, beat=beat, files=None, observers=observers
        )
        self._session, self._watching = session, list(observers)
        self._phase, self._newcomers = EVALUATE, False
        self._batches: Iterator[Any] = iter(())
        self._committed: Any = None  # the loader's state after the last committed step
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT_LINES)
        self._everyones: list[Any] = []  # what the ranks told with their votes in the last step
        self._resumes = self._is_resumed = False
        self._is_start = False  # whether the run begins, and its files are not open yet
        engine.before_update = self._vote

    def train(self, *, resume: bool) -> int:
        """Run to the last step, and make again what a lost group spoils. Returns the exit code."""
        self._resumes = resume
        started = time.perf_counter()
        with self.signals.caught(), contextlib.suppress(RunFinishedError):
            try:
                self._meet()
                if resume and self._is_start:
                    self._resume()
                self._repeat(self._go_on_to_the_end)
                status = self._end(time.perf_counter() - started)
            except UnitsLostError as error:
                raise PeerLostError(f"{error}; the run cannot go on; {self.checkpoints.newest()}") from None
            return status
        log.info("the other groups have finished the run")
        return 0

    def close(self) -> None:
        super().close()
        self._close_files()

    # -- the loop ----------------------------------------------------------------------------------

    def _repeat(self, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns, which is called again after each loss of a group."""
        while True:
            try:
                return action()
            except StepAbortedError:
                self._meet()

    def _go_on_to_the_end(self) -> None:
        while not self._is_done():
            self._do_what_is_due()
            if self._newcomers:
                self._meet()
            if not self._is_done():
                self._step(self._batches)

    def _is_done(self) -> bool:
        return self._phase == STEP and bool(self.engine.global_steps >= self.steps or self.stop_signal)

    def _do_what_is_due(self) -> None:
        """Check, evaluate and save after a step, from the present phase on."""
        step, interval = self.engine.global_steps, self.config.sdp.check_interval
        if self._phase <= CHECK:
            if interval and step and step % interval == 0:
                self.engine.check_holders()
            self._phase = EVALUATE
        training, is_last = self.config.training, step == self.steps
        if self._phase <= EVALUATE:
            stops = self.stop_signal and not is_last
            if step == 0 or (self.evaluator.is_due(step, is_last=is_last) and not stops):
                self._evaluate(is_last=is_last)
            self._phase = SAVE
        if self._phase <= SAVE:
            due = training.save_every and step and (is_last or step % training.save_every == 0)
            if due and not self.engine.was_step_skipped and not self.stop_signal:
                self.checkpoints.save()
            self._phase = STEP

    def _step(self, batches: Iterator[Any]) -> None:
        super()._step(batches)
        self._committed = self.engine.loader.state_dict()
        self._phase = CHECK

    def _vote(self) -> None:
        """Tell what this rank measured, and wait until all groups have finished their
        reductions.
        """
        facts = (self.meter.memory_now(), self.engine.traffic.by_kind(), self.signals.received)
        decision = self._session.vote(facts)
        self._everyones, self._newcomers = list(decision.facts), decision.newcomers

    def _begin_line(self, facts: StepFacts) -> None:
        everyones = self._everyones
        self.lines.begin(facts, self.meter.elapsed(), self.signals.received, lambda: everyones)

    def _record(self, lines: Iterable[tuple[dict[str, Any], int]]) -> None:
        assembly = self._session.assembly
        assert assembly is not None
        facts = {"groups": len(assembly.members), "generation": assembly.number}

        def kept() -> Iterator[tuple[dict[str, Any], int]]:
            for line, signal in lines:
                self._kept.append(line | facts)
                yield line | facts, signal

        super()._record(kept())

    def _resume(self) -> None:
        """Load the newest checkpoint together. All groups have met, and none has state."""
        try:
            self._is_resumed = self.checkpoints.resume()
        except StepAbortedError:
            raise PeerLostError("a group was lost while the checkpoint was loaded; start the run again") from None
        self._committed = self.engine.loader.state_dict()
        self._phase = STEP if self.engine.global_steps else EVALUATE
        self._meet()  # the coordinator learns the step

    # -- meetings ----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Meet the living groups, and go on together with what comes first for any of them."""
        self.beat.at(self.engine.global_steps, "meeting the other groups", None)
        self._newcomers = False
        self._drop_the_step()
        assembly = self._session.meet(self._phase, self._drop_the_step)
        self._phase = assembly.phase
        self._committed = self.engine.loader.state_dict()
        self._batches = iter(self.engine.loader)
        self.evaluator = Evaluator(self.engine, self.corpus, self.beat)
        self.checkpoints = Checkpointer(
            self.engine, self.dump_dir, self.corpus.identity, self.evaluator.recalibrated, self.beat
        )
        self.steps = self.steps or self._last_step(self.engine.global_steps)
        begins = all(member.fresh for member in assembly.members)
        self._is_start = self._is_start or begins
        if not (begins and self._resumes):  # a checkpoint comes before the files
            self._choose_writer(self._is_start)
            self._is_start = False

    def _drop_the_step(self) -> None:
        """Forget a step that was not committed. Its samples will be read again."""
        self.engine.forget_micro_batches()
        if self._committed is not None:
            self.engine.loader.load_state_dict(self._committed)

    def _choose_writer(self, is_first: bool) -> None:
        """Open or close the run's files, if this rank shall write them or another one does now."""
        if self._session.writes_files == (self.files is not None):
            return
        if self.files is not None:
            self._close_files()
            return
        # The writer of the run's beginning must find no other run.
        self.files = self._open_files(resume=self._resumes or not is_first)
        log.setLevel(logging.INFO)
        step = self.engine.global_steps
        if is_first:
            self._write_start(truncate_after=step if self._is_resumed else -1 if self._resumes else None)
            self._announce(step)
        else:
            self.files.truncate_after(step)
        self.observers = [*self._watching, Recorder(self.files), Progress(self.config.steps_per_print)]
        for observer in self.observers:
            observer.on_start(step, self.steps)
        if not is_first:
            self._write_missing_lines()

    def _write_missing_lines(self) -> None:
        """Write the lines of steps that the last writer committed, but did not write any more."""
        assert self.files is not None
        written = max((line["step"] for line in read_run(self.dump_dir).metrics), default=0)
        for line in self._kept:
            if line["step"] > written:
                self.files.step(line)

    def _open_files(self, *, resume: bool) -> RunFiles:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return RunFiles(self.dump_dir, resume=resume)
            except ConfigError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)  # the lock of a process that is being killed

    def _close_files(self) -> None:
        if self.files is not None:
            self.files.close()
            self.files, self.observers = None, self._watching

    def _write_start(self, truncate_after: int | None) -> None:
        assert self.files is not None
        if truncate_after is not None:
            self.files.truncate_after(truncate_after)
        self.files.write_config(self.config)
        self.files.write_placement(self._session.layout.placement)

    def _evaluate(self, *, is_last: bool = False) -> None:
        found = self.evaluator.evaluate(is_last=is_last)
        step = self.engine.global_steps
        if self.files is None or any(line["step"] == step for line in read_run(self.dump_dir).evaluations):
            return  # another group was lost after it had been written
        assembly = self._session.assembly
        assert assembly is not None
        for observer in self.observers:
            observer.on_evaluation({"step": step, "tokens": self._tokens, **found, "groups": len(assembly.members)})

    # -- the end -----------------------------------------------------------------------------------

    def _end(self, seconds: float) -> int:
        for observer in self.observers:
            observer.on_end()
        if self.stop_signal and self.engine.global_steps < self.steps:
            status = self._repeat(self._stop_early)
        else:
            status = 0
            self._repeat(lambda: self._finish(seconds))
        self._repeat(self._session.finish)
        return status
