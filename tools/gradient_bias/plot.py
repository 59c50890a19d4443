"""Draws the bias of gradients as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..shared.plots import COLOURS, SIZE_INCHES, dress, new_figure, save_figure


def plot_bias(
    by_batches: Mapping[str, Sequence[tuple[float, float]]],
    overall: Mapping[str, tuple[float, float]],
    by_unit: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
) -> Path:
    """Draw the bias of gradients into the PNG ``path`` and return it.

    The left panel shows the apparent bias against the number of batches, the estimated bias, and
    the bias that noise alone would cause. The right panel shows the estimate for each unit with its
    standard error. Each mapping has one entry for each kind of masking.

    Args:
        by_batches: points of number of batches and apparent bias.
        overall: the estimated bias, and the bias that noise alone would cause at the last point.
        by_unit: the estimate and its standard error for each unit.
        path: the file to write.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = new_figure((SIZE_INCHES[0], 4.6))
    left, right = figure.subplots(1, 2)
    for index, (colour, (name, points)) in enumerate(zip(COLOURS, by_batches.items(), strict=False)):
        bias, floor = overall[name]
        if drawn := [point for point in points if point[1] > 0]:
            left.plot(*zip(*drawn, strict=True), color=colour, marker="o", label=f"{name}: apparent")
        if points and floor > 0:
            last = points[-1][0]
            noise = [(size, floor * (last / size) ** 0.5) for size, _ in points]
            left.plot(*zip(*noise, strict=True), color=colour, linestyle=":", label=f"{name}: of noise alone, as 1/√N")
        if bias > 0:
            left.axhline(bias, color=colour, linestyle="--", linewidth=1.0, label=f"{name}: estimated")
        values = list(enumerate(by_unit[name]))
        right.errorbar(
            [unit + 0.15 * index for unit, _ in values], [value for _, (value, _) in values],
            [error for _, (_, error) in values],
            color=colour, marker="o", linestyle="none", capsize=3, label=name,
        )  # fmt: skip
    dress(left, "Bias of the mean gradient", "batches averaged")
    left.set(xscale="log", yscale="log", ylabel="relative to the dense gradient's norm")
    left.autoscale()
    ticks = sorted({size for points in by_batches.values() for size, _ in points})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    dress(right, "Estimated bias of each unit", "unit, in the model's order")
    right.set(ylabel="", xlim=(-0.6, max(map(len, by_unit.values())) - 0.4), ylim=(0, None))
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
