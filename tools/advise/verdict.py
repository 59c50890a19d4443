"""From plans and measured losses to one answer, and to what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.accounting.quantities import format_bytes
from .candidates import Candidate
from .evidence import Estimate, Evidence

SIMILAR = 3.0  # a setting that differs by no more than this factor is not called an extrapolation


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
    estimates = tuple(
        Estimate(one, evidence.nearest(one, length), reference.seconds / one.seconds, evidence.per_doubling)
        for one in found
    )
    known = [(one, one.at_equal_time) for one in estimates if one.candidate in fitting]
    ranked = [(one, loss) for one, loss in known if loss is not None]
    if not ranked:
        return Verdict(None, reference, estimates, (_nothing_fits(found, memory),))
    first, lowest = min(ranked, key=lambda each: each[1])
    within = [(one, loss) for one, loss in ranked if one is first or loss - lowest <= _uncertainty(one, first)]
    best, loss = within[0]  # the simplest of those that cannot be told apart
    return Verdict(best.candidate, reference, estimates, _reasons(best, loss, lowest, reference, fitting, within))


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
    lowest: float,
    reference: Candidate,
    fitting: Sequence[Candidate],
    within: Sequence[tuple[Estimate, float]],
) -> tuple[str, ...]:
    chosen = best.candidate
    reasons = []
    if reference not in fitting:
        reasons.append(f"The dense model does not fit: {reference.name} needs {format_bytes(reference.peak)}.")
    if chosen is reference:
        reasons.append(
            "It trains the whole model with the exact gradient, and no other way is expected to learn more in the "
            "same time."
        )
    else:
        reasons.append(
            f"A step takes {1 / best.steps:.2f} × the time of {reference.name}, so it makes {best.steps:.2f} × the "
            f"steps. Its loss is expected to be {loss:+.3f} nats of that of {reference.name} after the same time "
            f"({best.at_equal_steps:+.3f} after the same steps)."
        )
    close = [one.candidate.name for one, _ in within if one is not best]
    if close:
        reasons.append(
            f"Not told apart from it by the measured deviations: {', '.join(close)}. The simplest is named first."
        )
    if loss > lowest:
        reasons.append(f"The lowest expectation is {loss - lowest:.3f} nats lower, within the deviations.")
    sdp = [one for one in fitting if one.name.startswith("SDP")]
    if sdp and not chosen.name.startswith("SDP"):
        reasons.append("So the answer is not SDP.")
    return tuple(reasons)


def extrapolations(
    verdict: Verdict, evidence: Evidence, groups: int, tokens_of_group: float, tokens: float | None
) -> list[str]:
    """Say in which respects a run differs from where losses were measured.

    Args:
        verdict: the answer.
        evidence: measured losses.
        groups: number of groups of the run.
        tokens_of_group: tokens of one group in a step.
        tokens: tokens of the run, or None if nobody knows.
    """
    where, parameters = evidence.setting, verdict.reference.parameters
    lines = []
    per_parameter = None if tokens is None else tokens / parameters
    for what, own, (least, most), form in (
        ("parameters", parameters, where.parameters, ",.0f"),
        ("groups", groups, where.groups, ",.0f"),
        ("tokens of a group in a step", tokens_of_group, (where.tokens_of_group,) * 2, ",.0f"),
        ("tokens per parameter", per_parameter, where.tokens_per_parameter, ",.1f"),
    ):
        if own is not None and not least / SIMILAR <= own <= most * SIMILAR:
            measured = f"{least:,.0f}" + ("" if least == most else f" to {most:,.0f}")
            lines.append(f"{what}: {own:{form}} here, {measured} where losses were measured")
        elif own and what == "tokens per parameter":
            lines += _of_another_length(verdict, own)
    best = next((one for one in verdict.estimates if one.candidate is verdict.best), None)
    least, most = evidence.doubled
    if best is not None and abs(math.log(best.steps)) > math.log(most / least):
        lines.append(
            f"steps: {best.steps:,.2f} × those of {verdict.reference.name}, up to {most / least:,.0f} × measured"
        )
    return lines


def _of_another_length(verdict: Verdict, tokens_per_parameter: float) -> list[str]:
    """Name the ways whose figures are of much longer or shorter training than the run."""
    ways: dict[float, list[str]] = {}
    for one in verdict.estimates:
        if one.gap is None or (one.candidate.method == "dense" and one.candidate.every == 1):
            continue  # the dense model is what the others are compared with
        if not 1 / SIMILAR <= one.gap.tokens_per_parameter / tokens_per_parameter <= SIMILAR:
            ways.setdefault(one.gap.tokens_per_parameter, []).append(one.candidate.name)
    return [
        f"tokens per parameter: {tokens_per_parameter:,.1f} here, {measured:g} where the losses of these "
        f"were measured: {', '.join(names)}"
        for measured, names in ways.items()
    ]
