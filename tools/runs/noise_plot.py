"""Draws the gradient noise of runs as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...engine.errors import ConfigError
from ..shared.plots import COLOURS, new_figure, plain, save_figure
from .run_files import Run

_SIZE_INCHES = (10.0, 8.75)


def plot_noise(runs: Sequence[Run], path: Path) -> Path:
    """Draw the gradient noise of runs into the PNG ``path`` and return it.

    The upper panel has the noise scale of the model over tokens, in samples. The lower one has the
    trace of each unit's covariance, the mean over the measured steps.

    Raises:
        ConfigError: no run has measured noise, matplotlib is missing, or ``path`` cannot be
            written.
    """
    measured = [run for run in runs if any(line.get("noise") for line in run.metrics)]
    if not measured:
        raise ConfigError(
            f"{', '.join(str(run.path) for run in runs)}: no step has measured noise; set "
            "training.noise_scale_interval in a run"
        )
    figure = new_figure(_SIZE_INCHES)
    above, below = figure.subplots(2, 1)
    for index, run in enumerate(measured):
        colour = COLOURS[index % len(COLOURS)]
        points = [(line["tokens"], line["noise_scale"]) for line in run.metrics if line.get("noise_scale")]
        if points:
            above.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=plain(run.name))
        traces = mean_traces(run)
        below.plot(
            list(traces), list(traces.values()), color=colour, marker="o", linestyle="none", label=plain(run.name)
        )
    _dress(above, "Gradient noise scale tr Σ / ‖G‖², running mean", "samples")
    above.set_xlabel("tokens", fontsize=11)
    _dress(below, "tr Σ by unit, of one sample's gradient", "mean over the measured steps")
    below.tick_params(axis="x", labelrotation=90)
    if len(measured) > 1:
        figure.legend(*below.get_legend_handles_labels(), frameon=False, fontsize=10, loc="outside lower center")
    return save_figure(figure, path)


def mean_traces(run: Run) -> dict[str, float]:
    """Return by unit the mean of tr Σ over the measured steps. Units without a positive one are
    left out.
    """
    values: dict[str, list[float]] = {}
    for line in run.metrics:
        for unit, noise in (line.get("noise") or {}).items():
            if noise.get("trace") is not None:
                values.setdefault(unit, []).append(noise["trace"])
    means = {unit: fmean(traces) for unit, traces in values.items()}
    return {unit: mean for unit, mean in means.items() if mean > 0}


def _dress(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=13, loc="left", pad=10)
    axes.set_ylabel(label, fontsize=11)
    axes.set_yscale("log")
    axes.grid(True, color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
