"""From plans and measured losses to one answer, and to what it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ...engine.accounting.quantities import format_bytes
from ...engine.config.schema import Config
from ...engine.errors import shorten
from .candidate import Candidate
from .evidence import Estimate, Evidence, Gap

SIMILAR = 3.0  # a setting that differs by no more than this factor is not called an extrapolation
ALIKE = 1.25  # the same for the capacity


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        best: the candidate that is expected to have the lowest loss in the same time. None if
            nothing fits.
        reference: the candidate that losses and times are compared with.
        estimates: of all candidates, in their order.
        reasons: why, in sentences.
    """

    best: Candidate | None
    reference: Candidate
    estimates: tuple[Estimate, ...]
    reasons: tuple[str, ...]


def decide(
    found: Sequence[Candidate], memory: float | None, evidence: Evidence, tokens: float | None = None
) -> Verdict:
    """Choose among ``found``, of which the simple ones come first.

    Args:
        found: the candidates. One of them is dense.
        memory: bytes of a device. None if memory does not matter.
        evidence: measured losses.
        tokens: tokens of the run. None if nobody knows.
    """
    fitting = [one for one in found if memory is None or one.peak <= memory]
    dense = [one for one in found if one.method == "dense" and one.every == 1]
    reference = min([one for one in dense if one in fitting] or dense, key=lambda one: one.seconds)
    length = None if tokens is None else tokens / reference.parameters
    estimates = tuple(_estimate(one, reference, evidence, length) for one in found)
    known = [(one, one.at_equal_time) for one in estimates if one.candidate in fitting]
    ranked = [(one, loss) for one, loss in known if loss is not None]
    if not ranked:
        return Verdict(None, reference, estimates, (_nothing_fits(found, memory),))
    first, lowest = min(ranked, key=lambda each: each[1])
    within = [(one, loss) for one, loss in ranked if one is first or loss - lowest <= _uncertainty(one, first)]
    best, loss = within[0]  # the simplest of those that cannot be told apart
    reasons = _reasons(best, loss, (first, lowest), reference, fitting, within)
    return Verdict(best.candidate, reference, estimates, (*reasons, *_not_compared(found)))


def _estimate(one: Candidate, reference: Candidate, evidence: Evidence, length: float | None) -> Estimate:
    gap, steps = evidence.nearest(one, length), reference.seconds / one.seconds
    change = 0.0 if gap is None else evidence.change(one.method, length or gap.tokens_per_parameter, steps)
    return Estimate(one, gap, steps, change)


def _uncertainty(*estimates: Estimate) -> float:
    """Two sample deviations of the difference of two gaps, as if they were independent."""
    return 2 * math.hypot(*(one.gap.spread for one in estimates if one.gap is not None))


def _nothing_fits(found: Sequence[Candidate], memory: float | None) -> str:
    least = min(found, key=lambda one: one.peak)
    room = "" if memory is None else f" of the {format_bytes(memory)} of a device"
    return (
        f"Nothing that was planned fits. {least.name} needs the least: {format_bytes(least.peak)}{room}. Use more "
        "ranks, recomputation (activation_checkpointing) or tensor parallelism; sdp plan --fit searches for a layout."
    )


def _reasons(
    best: Estimate,
    loss: float,
    lowest: tuple[Estimate, float],
    reference: Candidate,
    fitting: Sequence[Candidate],
    within: Sequence[tuple[Estimate, float]],
) -> tuple[str, ...]:
    chosen = best.candidate
    reasons = []
    if reference not in fitting:
        reasons.append(f"The dense model does not fit: {reference.name} needs {format_bytes(reference.peak)}.")
    if chosen is reference:
        other = "expected" if lowest[0] is best else "shown"
        reasons.append(
            f"It trains the whole model with the exact gradient, and no other way is {other} to learn more in the "
            "same time."
        )
    else:
        reasons.append(
            f"A step takes {1 / best.steps:.2f} × the time of {reference.name}, so it makes {best.steps:.2f} × the "
            f"steps. Its loss is expected to differ from that of {reference.name} by {loss:+.3f} nats after the same "
            f"time ({best.at_equal_steps:+.3f} after the same steps)."
        )
    close = [one.candidate.name for one, _ in within if one is not best]
    if close:
        reasons.append(
            f"Not told apart from it by the measured deviations: {'; '.join(close)}. The simplest way is chosen."
        )
    least, expected = lowest
    if loss > expected:
        reasons.append(
            f"{least.candidate.name} has the lowest expectation, {loss - expected:.3f} nats lower, which is within the "
            "deviations."
        )
    if any(one.is_sdp for one in fitting) and not chosen.is_sdp:
        close_sdp = any(one.candidate.is_sdp for one, _ in within)
        reasons.append("SDP is not shown to be better." if close_sdp else "So the answer is not SDP.")
    return tuple(reasons)


def _not_compared(found: Sequence[Candidate]) -> list[str]:
    """Name the kinds of ways that could not be planned at all."""
    missing = [] if any(one.is_sdp for one in found) else ["SDP"]
    if not any(one.method == "smaller dense" for one in found):
        missing.append("a smaller dense model")
    return [f"Could not be planned, and so was not compared (see below): {' and '.join(missing)}."] if missing else []


def extrapolations(
    verdict: Verdict, evidence: Evidence, config: Config, tokens_of_group: float, tokens: float | None
) -> list[str]:
    """Say in which respects a run differs from where losses were measured.

    Args:
        verdict: the answer.
        evidence: measured losses.
        config: the run, with its groups.
        tokens_of_group: tokens of one group in a step.
        tokens: tokens of the run, or None if nobody knows.
    """
    groups = config.sdp.groups
    where, parameters = evidence.setting, verdict.reference.parameters
    lines: list[str] = []
    beyond: set[str] = set()  # in what the run is far from all measured ones
    per_parameter = None if tokens is None else tokens / parameters
    for what, own, (least, most) in (
        ("parameters", parameters, where.parameters),
        ("groups", groups, where.groups),
        ("tokens of a group in a step", tokens_of_group, (where.tokens_of_group,) * 2),
        ("tokens per parameter", per_parameter, where.tokens_per_parameter),
    ):
        if own is not None and not least / SIMILAR <= own <= most * SIMILAR:
            measured = _number(least) + ("" if least == most else f" to {_number(most)}")
            lines.append(f"{what}: {_number(own)} here, {measured} where losses were measured")
            beyond.add(what)
    lines += _of_other_settings(verdict, per_parameter, beyond)
    return [*lines, *_of_more_steps(verdict, evidence, per_parameter), *_of_another_recipe(config)]


def _number(value: float) -> str:
    """Three digits of a number, or all that it has before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_other_settings(verdict: Verdict, per_parameter: float | None, beyond: Set[str]) -> list[str]:
    """Name the ways whose figures are of another setting than the run.

    Args:
        verdict: the answer.
        per_parameter: tokens per parameter of the run, or None if nobody knows.
        beyond: settings that no figure is near. These are left out.
    """
    lines: list[str] = []
    for what, of_run, of_figure, factor in (
        ("groups", lambda one: one.groups, lambda gap: gap.groups, SIMILAR),
        ("tokens per parameter", lambda one: per_parameter, lambda gap: gap.tokens_per_parameter, SIMILAR),
        ("steps of a round", lambda one: one.every, lambda gap: gap.every, SIMILAR),
        ("capacity", lambda one: one.capacity, lambda gap: gap.capacity, ALIKE),
    ):
        if what not in beyond:
            lines += [
                f"{what}: {_number(here)} here, {measured:g} where the losses of these were measured: "
                + "; ".join(names)
                for (here, measured), names in _ways_that_differ(verdict, of_run, of_figure, factor).items()
            ]
    return lines


def _ways_that_differ(
    verdict: Verdict, of_run: Callable[[Candidate], float | None], of_figure: Callable[[Gap], float], factor: float
) -> dict[tuple[float, float], list[str]]:
    """Return the names of ways whose figure differs from the run by more than ``factor``, by both
    values.
    """
    ways: dict[tuple[float, float], list[str]] = {}
    for one in verdict.estimates:
        if one.gap is None or (one.candidate.method == "dense" and one.candidate.every == 1):
            continue  # the dense model is what the others are compared with
        here, measured = of_run(one.candidate), of_figure(one.gap)
        if here is not None and not 1 / factor <= measured / here <= factor:
            ways.setdefault((here, measured), []).append(one.candidate.name)
    return ways


def _of_more_steps(verdict: Verdict, evidence: Evidence, per_parameter: float | None) -> list[str]:
    """Name the ways whose faster or slower steps count more than was measured.

    Args:
        verdict: the answer.
        evidence: measured losses.
        per_parameter: tokens per parameter of the run, or None if nobody knows.
    """
    faster = [one for one in verdict.estimates if one.gap is not None and not 1 / ALIKE <= one.steps <= ALIKE]
    lines = []
    if local := [one.candidate.name for one in faster if one.candidate.every > 1]:
        lines.append(
            f"faster steps: their effect was measured with averages in every step, and not for {'; '.join(local)}"
        )
    shortest, longest = evidence.lengths
    outside = [
        one.candidate.name
        for one in faster
        if per_parameter is not None
        and (
            min(1, one.steps) * per_parameter < shortest / SIMILAR
            or max(1, one.steps) * per_parameter > longest * SIMILAR
        )
    ]
    if outside:
        lines.append(
            f"faster or slower steps: their effect was measured from {shortest:g} to {longest:g} tokens per parameter, "
            f"which these leave: {'; '.join(outside)}"
        )
    return lines


def _of_another_recipe(config: Config) -> list[str]:
    """Say what of the configuration differs from the runs in which SDP's losses were measured."""
    sdp, model = config.sdp, str(config.model.get("name", "another"))
    optimizer = "none" if config.optimizer is None else config.optimizer.type
    found = []
    for what, own, measured in (
        ("model", model, "llama"),
        ("optimizer", optimizer, "AdamW"),
        ("sdp.granularity", sdp.granularity, "block"),
        ("sdp.profile", "depth" if sdp.profile == "auto" else sdp.profile, "depth"),
    ):
        if own != measured:
            found.append(f"{what}: {shorten(str(own))} here, {measured} where losses were measured")
    if sdp.sync is None and sdp.lr_scale not in ("auto", 0.5):
        found.append(
            f"sdp.lr_scale: {sdp.lr_scale} here, 0.5 where losses with averages in every step were measured (of the "
            "schedule: the better of 0.5 and none)"
        )
    return found
