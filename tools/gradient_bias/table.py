"""The report of ``sdp gradient-bias``: a table, a verdict in words, JSON, and the points of the
plot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ...engine.placement.units import SHARED
from .estimate import Bias
from .measure import OVERALL, Measured


def to_json(measured: Measured) -> dict[str, Any]:
    """Return every figure, see :class:`~sdp.tools.gradient_bias.estimate.Bias` for their
    meaning.
    """
    biases = {
        name: {unit: asdict(bias) | {"shown": bias.shown} for unit, bias in of_units.items()}
        for name, of_units in measured.biases.items()
    }
    return asdict(measured) | {"biases": biases}


def table(measured: Measured) -> str:
    """Return a Markdown table by unit, and below it what the figures show."""
    what = "the same rows for every rank" if measured.same_data else "rows of its own for every rank"
    lines = [
        f"bias of the gradient against the dense model's: {measured.batches} batches of {measured.samples} samples, "
        f"{what}; weights: {measured.weights}",
        "",
        "| unit | holders |" + "".join(f" {name}: apparent | noise | bias | cosine |" for name in measured.biases),
        "|---" * (2 + 4 * len(measured.biases)) + "|",
    ]
    for unit in (*measured.holders, OVERALL):
        cells = [cell for of_units in measured.biases.values() for cell in _cells(of_units[unit])]
        lines.append(f"| {unit} | {measured.holders.get(unit, '')} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{name}: {_verdict(of_units[OVERALL])}" for name, of_units in measured.biases.items()]
    return "\n".join(lines)


def _cells(bias: Bias) -> Iterator[str]:
    for value in (bias.apparent, bias.floor):
        yield "–" if value is None else f"{value:.4f}"
    error = f" ± {bias.error:.4f}" if bias.error and not bias.rounding else ""
    yield "–" if bias.bias is None else f"{bias.bias:.4f}{error}" if bias.shown or bias.rounding else "not shown"
    yield "–" if bias.cosine is None else f"{bias.cosine:.4f}"


def _verdict(bias: Bias) -> str:
    if bias.apparent is None:
        return "the dense gradient is zero"
    if bias.apparent == 0:
        return "exactly the dense gradient on every batch"
    if bias.rounding:
        return f"the dense gradient on every batch, but for rounding ({bias.apparent:.1e} of its norm)"
    if bias.shown:
        return f"biased by {bias.bias:.4f} of the dense gradient's norm ({bias.z:.1f} standard errors of its square)"
    return (
        f"no bias shown: the apparent {bias.apparent:.4f} is what noise makes ({bias.floor:.4f} expected; "
        f"{bias.z:+.1f} standard errors)"
    )


def plot_points(measured: Measured) -> tuple[dict[str, tuple[float, float]], dict[str, list[tuple[float, float]]]]:
    """Return what the plot shows, by masking.

    First the estimated overall bias and its noise floor, then each unit's bias and standard error.
    """
    overall = {
        name: (of_units[OVERALL].bias or 0.0, of_units[OVERALL].floor or 0.0)
        for name, of_units in measured.biases.items()
    }
    units = [unit for unit in measured.holders if unit != SHARED]
    by_unit = {
        name: [(of_units[unit].bias or 0.0, of_units[unit].error or 0.0) for unit in units]
        for name, of_units in measured.biases.items()
    }
    return overall, by_unit
