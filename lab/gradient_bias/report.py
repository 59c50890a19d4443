"""Reports a measurement of bias: a table, a verdict in words, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdp.engine.placement.units import SHARED
from sdp.tools.runs.plot import COLOURS, SIZE_INCHES, dress, new_figure, save_figure

from .estimate import Bias
from .measure import OVERALL, Measured


def to_json(measured: Measured) -> dict[str, Any]:
    """Return every figure for JSON. :class:`Bias` says what the figures mean."""
    biases = {
        name: {unit: asdict(bias) | {"shown": bias.shown} for unit, bias in of_units.items()}
        for name, of_units in measured.biases.items()
    }
    return asdict(measured) | {"biases": biases}


def table(measured: Measured) -> str:
    """Return a Markdown table with a row for each unit, and below it what the figures show."""
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


def plot(measured: Measured, path: Path) -> None:
    """Draw the bias of gradients into the PNG ``path``.

    The left panel shows the apparent bias against the number of batches, the estimated bias, and
    the bias that noise alone would cause. The right panel shows the estimate for each unit with its
    standard error.
    """
    figure = new_figure((SIZE_INCHES[0], 4.6))
    left, right = figure.subplots(1, 2)
    units = [unit for unit in measured.holders if unit != SHARED]
    for index, (colour, (name, biases)) in enumerate(zip(COLOURS, measured.biases.items(), strict=False)):
        points, overall = measured.by_batches[name], biases[OVERALL]
        if drawn := [point for point in points if point[1] > 0]:
            left.plot(*zip(*drawn, strict=True), color=colour, marker="o", label=f"{name}: apparent")
        if points and overall.floor:
            noise = [(size, overall.floor * (points[-1][0] / size) ** 0.5) for size, _ in points]
            left.plot(*zip(*noise, strict=True), color=colour, linestyle=":", label=f"{name}: of noise alone, as 1/√N")
        if overall.bias:
            left.axhline(overall.bias, color=colour, linestyle="--", linewidth=1.0, label=f"{name}: estimated")
        right.errorbar(
            [place + 0.15 * index for place in range(len(units))],
            [biases[unit].bias or 0.0 for unit in units],
            [biases[unit].error or 0.0 for unit in units],
            color=colour, marker="o", linestyle="none", capsize=3, label=name,
        )  # fmt: skip
    dress(left, "Bias of the mean gradient", "batches averaged")
    left.set(xscale="log", yscale="log", ylabel="relative to the dense gradient's norm")
    left.autoscale()
    ticks = sorted({size for points in measured.by_batches.values() for size, _ in points})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    dress(right, "Estimated bias of each unit", "unit, in the model's order")
    right.set(ylabel="", xlim=(-0.6, len(units) - 0.4), ylim=(0, None))
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)
