"""Writes every step and every evaluation to the files of the run."""

from __future__ import annotations

from ...runs.run_files import RunFiles
from .observer import Line, Observer


class Recorder(Observer):
    """Writes metrics.jsonl and evaluations.jsonl."""

    def __init__(self, files: RunFiles):
        self._files = files

    def on_step(self, line: Line) -> None:
        self._files.step(line)

    def on_rollback(self, step: int) -> None:
        self._files.truncate_after(step)

    def on_evaluation(self, line: Line) -> None:
        self._files.evaluation(line)
