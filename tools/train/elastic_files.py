"""The files of an elastic run: another group writes them when the group that wrote them is lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import Literal

from ...engine.elastic.session import Session
from ...engine.errors import ConfigError
from ..runs.run_files import CONFIG, LOCK, RunFiles, mark_begun, read_run
from .loop.training_run import TrainingRun
from .observers.monitors import open_monitors
from .observers.observer import Line, Observer
from .observers.progress import Progress
from .observers.recorder import Recorder
from .process.terminal import TerminalHandler, open_terminal

log = logging.getLogger("sdp")

_KEPT_LINES = 256  # of the run's files, for the case that the group that writes them is lost
_LOCK_SECONDS = 0.5  # how long to wait for the lock of the last writer, until it is taken away


class ElasticFiles:
    """Opens the files of ``run`` when this rank becomes the one that writes them.

    Args:
        run: the run, whose ``files`` and ``observers`` are changed.
        session: says which rank writes.
        resumes: whether the run continues an earlier one.
    """

    def __init__(self, run: TrainingRun, session: Session, *, resumes: bool):
        self._run, self._session, self._resumes = run, session, resumes
        sync = run.config.sdp.sync
        self._newest = _NewestLines(_KEPT_LINES + (sync.every if sync is not None else 0))
        self._watching: list[Observer] = [*run.observers, self._newest]
        run.observers = self._watching
        self._own: list[Observer] = []  # that write files
        self._terminal = open_terminal()
        # Rank 0 logs to the terminal always, any other rank while it writes the files.
        self._handler = TerminalHandler(self._terminal) if session.slot and self._terminal is not None else None
        self._start: int | None = None  # the step after which the start truncates, if this rank saw it

    @property
    def is_silent(self) -> bool:
        """Whether no line was told since the start of the run, which this rank has seen."""
        return self._start is not None and not self._newest.lines

    def follow_writer(self, truncate_after: int, *, is_first: bool, is_silent: bool) -> None:
        """Open or close the files, if this rank shall write them or another one does now.

        Args:
            truncate_after: at the start of the run, the step after which lines of an earlier run
                are removed.
            is_first: whether the run starts.
            is_silent: see above, before the last meeting. Then the first writer may have died
                before it wrote anything.
        """
        run = self._run
        if is_first:
            self._start = truncate_after
            mark_begun(run.dump_dir)
        if self._session.writes_files == (run.files is not None):
            return
        if run.files is not None:
            self.close()
            return
        # Curves may have to log in to a server.
        run.beat.at(run.engine.global_steps, "opening the run's files", run.config.training.start_timeout)
        is_first = is_first or not (run.dump_dir / CONFIG).exists()
        run.files = self._open(is_first=is_first)
        # Another group may have written curves of this run.
        monitors = open_monitors(run.config, run.dump_dir, resume=self._resumes or not is_first)
        log.setLevel(logging.INFO)
        if self._handler is not None:
            log.addHandler(self._handler)
        step = run.engine.global_steps
        if not is_first:
            log.info("group %d writes the files of the run, and shows its progress, from now on", self._session.slot)
        if is_first or is_silent:
            run.write_start(self._session.layout.placement, truncate_after=self._start)
            run.announce(step)
        else:
            run.files.truncate_after(step)
        self._own = [Recorder(run.files), monitors, Progress(run.config.steps_per_print, self._terminal)]
        run.observers = [*self._watching, *self._own]
        run.tell_start(step)
        if not is_first:
            self._write_missing_lines(run.files, monitors)

    def close(self) -> None:
        """Close the files, if this rank writes them."""
        if self._run.files is not None:  # curves may have to be uploaded
            training = self._run.config.training
            self._run.beat.at(self._run.engine.global_steps, "closing the run's files", training.start_timeout)
        for observer in self._own:
            with contextlib.suppress(OSError):  # a write that failed before, and was reported then
                observer.close()
        self._own = []
        if self._run.files is not None:
            self._run.files.close()
            self._run.files, self._run.observers = None, self._watching
        if self._handler is not None:
            log.removeHandler(self._handler)
            log.setLevel(logging.WARNING)

    def _open(self, *, is_first: bool) -> RunFiles:
        """Open the files. The coordinator has chosen this rank, so it may take another one's lock.

        The last writer may be stopped (SIGSTOP) and never release its lock. When it wakes up, it
        has no vote, so it writes no more lines.
        """
        # The writer of the run's beginning must find no other run.
        resume = self._resumes or not is_first
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return RunFiles(self._run.dump_dir, resume=resume)
            except ConfigError:
                if is_first:
                    raise
                if time.monotonic() > end:
                    (self._run.dump_dir / LOCK).unlink(missing_ok=True)
                    return RunFiles(self._run.dump_dir, resume=resume)
                time.sleep(0.05)

    def _write_missing_lines(self, files: RunFiles, monitors: Observer) -> None:
        """Write the lines that the last writer did not write any more.

        Curves get the newest lines of the files again, because the last writer may have died
        between two files, or with points in memory. In TensorBoard and CSV, new points replace
        older ones. Weights & Biases gets them twice.
        """
        found = read_run(self._run.dump_dir)
        steps: dict[int, Line] = {line["step"]: line for line in found.metrics[-_KEPT_LINES:]}
        evaluations: dict[int, Line] = {line["step"]: line for line in found.evaluations}
        last = max(steps, default=0)
        for kind, line in self._newest.lines:
            if kind == "step" and line["step"] > last:
                steps[line["step"]] = line
                files.step(line)
            if kind == "evaluation" and line["step"] not in evaluations:
                evaluations[line["step"]] = line
                files.evaluation(line)
        first = min(steps) if len(found.metrics) > _KEPT_LINES else 0
        for step in sorted({*steps, *(step for step in evaluations if step >= first)}):
            if step in steps:
                monitors.on_step(steps[step])
            if step in evaluations:
                monitors.on_evaluation(evaluations[step])


class _NewestLines(Observer):
    """Keeps the newest lines of the run's files in memory, each with its kind."""

    def __init__(self, count: int) -> None:
        self.lines: deque[tuple[Literal["step", "evaluation"], Line]] = deque(maxlen=count)

    def on_step(self, line: Line) -> None:
        self.lines.append(("step", line))

    def on_evaluation(self, line: Line) -> None:
        self.lines.append(("evaluation", line))
