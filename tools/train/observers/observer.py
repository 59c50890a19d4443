"""The base class of observers: files, curves, progress bar and profiler watch the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Line = Mapping[str, Any]  # a line of metrics.jsonl or evaluations.jsonl


class Observer:
    """Watches the training loop on one rank. A subclass overrides the hooks that it needs.

    The trainer calls the observers in the order of its list. No hook is collective.
    """

    def on_start(self, start: int, steps: int) -> None:
        """Called before the run goes from step ``start`` to step ``steps``."""

    def around_step(self, step: int, compute: Callable[[], None]) -> None:
        """Run ``compute``, which is forward, backward and update of optimizer step ``step``."""
        compute()

    def on_step(self, line: Line) -> None:
        """Called after an optimizer step. ``line`` is its line of metrics.jsonl."""

    def on_evaluation(self, line: Line) -> None:
        """Called after the full model was evaluated. ``line`` is a line of evaluations.jsonl."""

    def on_rollback(self, step: int) -> None:
        """Called after the run returned to the checkpoint of ``step``.

        Later steps are made again.
        """

    def on_end(self) -> None:
        """Called after the loop: the run is done, or a signal stopped it."""

    def close(self) -> None:
        """Flush and close files. Called once, also when the run fails."""
