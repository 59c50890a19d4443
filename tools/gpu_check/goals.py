"""The measured rows of the GPU check, and the goals that they must reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .rows import CONFIGS, DENSE, Planned, Row
from .share import Share

# MFU of the 1 B dense model; peak and speed of blocks under forward masking; accuracy of the plan,
# peak and state.
LEAST_MFU, MOST_PEAK, LEAST_SPEED, PEAK_WITHIN, STATE_WITHIN = 0.50, 1.03, 0.94, 0.05, 0.01


@dataclass(frozen=True)
class Result:
    """A row that was begun: its measurement and its plan, or the errors that prevented them.

    ``plan_error`` says why a measured row has no plan. ``seconds`` leave out the wait for the plan.
    """

    row: Row
    seconds: float
    planned: Planned | None = None
    share: Share | None = None
    error: str = ""
    plan_error: str = ""


@dataclass(frozen=True)
class Goal:
    """A goal in words, the measured figure, and whether it was reached.

    A goal without a figure, because a plan is missing, counts as not reached.
    """

    text: str
    value: float | None
    reached: bool


def speed_over_bound(result: Result, results: Sequence[Result]) -> float | None:
    """Return the speedup over the dense model, divided by the speedup that the operations allow.

    None if a figure is missing.
    """
    dense = _dense(result, results)
    if result.share is None or result.planned is None or not result.row.compiled or dense is None:
        return None
    if dense.share is None or dense.planned is None:
        return None
    faster = result.share.tokens_per_second / dense.share.tokens_per_second
    return faster * (result.planned.flops / dense.planned.flops)


def _dense(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the result of the dense model of the same configuration, if it was measured."""
    same = (found for found in results if (found.row.config, found.row.variant) == (result.row.config, DENSE))
    return next((found for found in same if found.share is not None), None)


def goals_of(results: Sequence[Result], rate: float) -> list[Goal]:
    """Return the goals that apply to the measured rows.

    The peaks of compiled programs count allocated bytes, which is what users see. The accuracy of
    the plan counts the requested bytes of an uncompiled program, because the plan describes that.
    """
    return [
        goal
        for result in results
        if result.share is not None
        for goal in _goals_of_row(result, result.share, results, rate)
    ]


def _goals_of_row(result: Result, share: Share, results: Sequence[Result], rate: float) -> list[Goal]:
    row = result.row
    if not row.compiled:
        return _goals_of_plan(result, share)
    if row == Row(CONFIGS[0], DENSE):
        return _goal(result, "MFU", share.mfu(rate), f"at least {LEAST_MFU:g}", lambda value: value >= LEAST_MFU)
    if (row.variant.granularity, row.variant.masking) == ("block", "forward"):
        return _goals_of_skipping(result, share, results)
    return []


def _goals_of_plan(result: Result, share: Share) -> list[Goal]:
    """The plan of an uncompiled program describes the bytes that it requests."""
    planned, missing = result.planned, "" if result.planned else "its plan"
    peak = planned and share.requested_over_planned(planned)
    state = planned and share.state_bytes / planned.state_bytes
    return [
        *_goal(
            result,
            "requested peak over planned",
            peak,
            f"1 ± {PEAK_WITHIN:g}",
            lambda value: abs(value - 1) <= PEAK_WITHIN,
            missing,
        ),
        *_goal(
            result,
            "state over planned",
            state,
            f"1 ± {STATE_WITHIN:g}",
            lambda value: abs(value - 1) <= STATE_WITHIN,
            missing,
        ),
    ]


def _goals_of_skipping(result: Result, share: Share, results: Sequence[Result]) -> list[Goal]:
    """Skipped blocks save as much memory and time as the plan and the count of operations say."""
    planned, missing = result.planned, "" if result.planned else "its plan"
    goals = _goal(
        result,
        "allocated peak over planned",
        planned and share.over_planned(planned),
        f"at most {MOST_PEAK:g}",
        lambda value: value <= MOST_PEAK,
        missing,
    )
    dense = _dense(result, results)
    if dense is not None:  # without its tokens there is nothing to compare with
        missing = missing or ("" if dense.planned else "the dense model's plan")
        what, aim = "tokens/s over the bound of operations", f"at least {LEAST_SPEED:g}"
        goals += _goal(
            result, what, speed_over_bound(result, results), aim, lambda value: value >= LEAST_SPEED, missing
        )
    return goals


def _goal(
    result: Result, what: str, value: float | None, aim: str, reached: Callable[[float], bool], missing: str = ""
) -> list[Goal]:
    """Return the goal in a list, which is empty if there is no ``value``.

    Args:
        result: the measured row.
        what: what is compared with the aim.
        value: the figure.
        aim: the aim, for the reader.
        reached: whether a figure reaches the aim.
        missing: what the figure needs and does not have.
    """
    name = name_of(result.row)
    if missing:
        return [Goal(f"{name}: {what}, aim {aim}: not shown, because {missing} is missing", None, False)]
    if value is None:
        return []
    verdict = "reached" if reached(value) else "NOT reached"
    return [Goal(f"{name}: {what} {value:.3f}, aim {aim}: {verdict}", value, reached(value))]


def name_of(row: Row) -> str:
    """Name a row for the report: its configuration and itself."""
    return f"{row.config} {row.name}"
