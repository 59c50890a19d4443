"""The files of an elastic run: another group writes them when the group that wrote them is lost."""

from __future__ import annotations

import logging
import time
from collections import deque

from ...engine.elastic.session import Session
from ...engine.errors import ConfigError
from ..runs.run_files import RunFiles, read_run
from .loop.training_run import TrainingRun
from .observers.observer import Line, Observer
from .observers.progress import Progress
from .observers.recorder import Recorder

log = logging.getLogger("sdp")

_KEPT_LINES = 16  # of metrics.jsonl, for the case that the group that writes them is lost
_LOCK_SECONDS = 20.0  # how long the lock of a lost group's files may last


class ElasticFiles:
    """Opens the files of ``run`` when this rank becomes the one that writes them.

    Args:
        run: the run, whose ``files`` and ``observers`` are changed.
        session: says which rank writes.
        resumes: whether the run continues an earlier one.
    """

    def __init__(self, run: TrainingRun, session: Session, *, resumes: bool):
        self._run, self._session, self._resumes = run, session, resumes
        self._newest = _NewestLines()
        self._watching: list[Observer] = [*run.observers, self._newest]
        run.observers = self._watching

    def follow_writer(self, *, is_first: bool, truncate_after: int | None = None) -> None:
        """Open or close the files, if this rank shall write them or another one does now.

        Args:
            is_first: whether the run begins.
            truncate_after: at the beginning, the step after which lines of an earlier run are
                removed, None to keep all of them.
        """
        run = self._run
        if self._session.writes_files == (run.files is not None):
            return
        if run.files is not None:
            self.close()
            return
        # The writer of the run's beginning must find no other run.
        run.files = self._open(resume=self._resumes or not is_first)
        log.setLevel(logging.INFO)
        step = run.engine.global_steps
        if is_first:
            run.write_start(self._session.layout.placement, truncate_after=truncate_after)
            run.announce(step)
        else:
            run.files.truncate_after(step)
        run.observers = [*self._watching, Recorder(run.files), Progress(run.config.steps_per_print)]
        run.tell_start(step)
        if not is_first:
            self._write_missing_lines(run.files)

    def close(self) -> None:
        """Close the files, if this rank writes them."""
        if self._run.files is not None:
            self._run.files.close()
            self._run.files, self._run.observers = None, self._watching

    def _open(self, *, resume: bool) -> RunFiles:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return RunFiles(self._run.dump_dir, resume=resume)
            except ConfigError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)  # the lock of a process that is being killed

    def _write_missing_lines(self, files: RunFiles) -> None:
        """Write the lines of steps that the last writer committed, but did not write any more."""
        written = max((line["step"] for line in read_run(self._run.dump_dir).metrics), default=0)
        for line in self._newest.lines:
            if line["step"] > written:
                files.step(line)


class _NewestLines(Observer):
    """Keeps the newest lines of metrics.jsonl in memory."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=_KEPT_LINES)

    def on_step(self, line: Line) -> None:
        self.lines.append(line)
