"""Counts the steps that were skipped in a row, and ends a run that does not recover."""

from __future__ import annotations

import logging

from ..errors import NonFiniteError

log = logging.getLogger("sdp")


class SkippedSteps:
    """The number of steps skipped in a row because a gradient was NaN or infinite.

    Steps at a dynamic loss scale that can still be lowered are excused: they do not count towards
    the limit.
    """

    def __init__(self, allowed: int):
        self._allowed = allowed
        self.in_a_row = 0
        self._excused = 0
        self._groups = "all groups"

    def note(self, skipped: bool, *, excused: bool = False, groups: str = "all groups") -> None:
        """Count one step.

        A step that was not skipped resets the count. ``groups`` says who skipped it.
        """
        self._groups = groups
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self._excused = self._excused + excused if skipped else 0

    def report(self, step: int, norm: float | None, loss_scale: float | None) -> None:
        """Warn that ``step`` was skipped.

        Raises:
            NonFiniteError: More steps than allowed were skipped in a row.
        """
        counted = self.in_a_row - self._excused
        if counted > self._allowed:
            at_scale = "" if loss_scale is None else f" and loss scale {loss_scale:g}"
            raise NonFiniteError(
                f"the gradient's norm is {norm} at step {step}{at_scale}, for the {counted}. time in a row "
                f"(training.max_skips {self._allowed}); the weights are those after step {step - self.in_a_row}: "
                "lower the learning rate, or resume from an earlier checkpoint"
            )
        scale = "" if loss_scale is None else f", the loss scale is now {loss_scale:g}"
        log.warning(
            "step %d was skipped by %s: the gradient's norm is %s%s (%d in a row, training.max_skips %d)",
            *(step, self._groups, norm, scale, counted, self._allowed),
        )
