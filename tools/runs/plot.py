"""Draws plots as PNG files: loss curves of runs, sweeps, bars, lines and the bias of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import ConfigError
from .run_files import Run

SIZE_INCHES, DPI = (10.0, 6.25), 160  # 1600 × 1000 pixels
_SMOOTHED: dict[str, Any] = {"linewidth": 1.8}
_FULL_MODEL: dict[str, Any] = {
    "marker": "o", "markersize": 8, "markeredgecolor": "white", "markeredgewidth": 1.2, "linewidth": 1.0, "linestyle": (0, (4, 2)),
}  # fmt: skip
_SUBNETWORK: dict[str, Any] = {
    "marker": "_",
    "markersize": 12,
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "alpha": 0.8,
}
_COLOURS = ("#0b62a4", "#c8531c", "#2e7d32", "#7b3fa0", "#8a6d00", "#a3195b")


class _Colours(NamedTuple):
    training: str
    held_out: str
    subnetworks: str


def plot_loss(runs: Sequence[Run], path: Path) -> Path:
    """Draw loss against tokens into the PNG ``path`` and return it.

    Each run has the training loss, raw (light) and smoothed. On held-out text it has the losses of
    the full model and of every group's subnetwork. Losses are in nats per token. Raises ConfigError
    if matplotlib is missing or ``path`` cannot be written.
    """
    figure_class, canvas = _matplotlib()
    figure = figure_class(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    canvas(figure)
    axes = figure.add_subplot()
    scale, unit = _token_unit(runs)
    for run, colours in zip(runs, _palette(len(runs)), strict=False):
        _draw(axes, run, colours, scale)
    _dress(axes, "Loss by run" if len(runs) > 1 else f"Loss of {runs[0].name}", unit)
    _legend(axes, runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{path}: the plot cannot be written ({error.strerror})") from None
    return path


def plot_sweep(figures: Mapping[str, Sequence[Mapping[str, Any]]], measure: str, path: Path) -> Path:
    """Draw the figures of a sweep into the PNG ``path`` and return it.

    There is a panel for each key of ``figures``. It shows ``measure`` against capacity, with a line
    for each profile and the standard deviation over the seeds. A row of ``figures`` has capacity,
    profile, mean and spread. The spread is None if there was one seed.
    """
    figure_class, canvas = _matplotlib()
    figure = figure_class(figsize=(SIZE_INCHES[0], 5.0), dpi=DPI, layout="constrained")
    canvas(figure)
    panels = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(panels, figures.items(), strict=True):
        for colour, profile in zip(itertools.cycle(_COLOURS), dict.fromkeys(row["profile"] for row in rows)):
            own = [row for row in rows if row["profile"] == profile]
            spreads = [row["spread"] or 0.0 for row in own]
            axes.errorbar(
                [row["capacity"] for row in own], [row["mean"] for row in own], spreads, color=colour, label=profile, capsize=4,
                marker="o", linestyle="--" if "dense" in profile else "-",
            )  # fmt: skip
        _dress(axes, title, "capacity")
        capacities = [row["capacity"] for row in rows]
        axes.set_xlim(min(capacities) - 0.05, max(capacities) + 0.05)
        axes.set_ylabel("")
    panels[0].set_ylabel(f"{measure} of the full model, held out", fontsize=12)
    panels[-1].legend(frameon=False, fontsize=11)
    figure.savefig(path, format="png")
    return path


def plot_bars(panels: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draw bars into the PNG ``path``.

    There is a panel for each key, with a bar for each name. All panels have the same names. Raises
    ConfigError if matplotlib is missing.
    """
    figure_class, canvas = _matplotlib()
    figure = figure_class(
        figsize=(SIZE_INCHES[0], 1.6 + 0.34 * len(next(iter(panels.values())))), dpi=DPI, layout="constrained"
    )
    canvas(figure)
    for axes, (label, values) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        bars = axes.barh(
            list(values), list(values.values()), color=[_COLOURS[name.startswith("sdp")] for name in values]
        )
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        axes.set_xlabel(label, fontsize=12)
        axes.margins(x=0.16)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()  # the first name is on top; the panels share this axis
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path, format="png")


def plot_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, across: str, up: str, path: Path
) -> None:
    """Draw lines through points into the PNG ``path``, on logarithmic axes.

    Args:
        lines: the points of each line, by its name.
        title: the title of the plot.
        across: the label of the horizontal axis.
        up: the label of the vertical axis.
        path: the file to write.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure_class, canvas = _matplotlib()
    figure = figure_class(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    canvas(figure)
    axes = figure.add_subplot()
    looks = itertools.product("osD^", _COLOURS)
    for (name, points), (marker, colour) in zip(lines.items(), looks, strict=False):
        style = {"linestyle": "-", "linewidth": 2.4} if name.startswith("sdp") else {"linestyle": "--"}
        axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=7, **style)
    _dress(axes, title, across)
    axes.set(xscale="log", yscale="log", ylabel=up)
    axes.autoscale()
    ticks = [x for x, _ in next(iter(lines.values()))]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("{x:,.0f}")
    figure.legend(frameon=False, fontsize=10, loc="outside right center")
    figure.savefig(path, format="png")


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
    figure_class, canvas = _matplotlib()
    figure = figure_class(figsize=(SIZE_INCHES[0], 4.6), dpi=DPI, layout="constrained")
    canvas(figure)
    left, right = figure.subplots(1, 2)
    for index, (colour, (name, points)) in enumerate(zip(_COLOURS, by_batches.items(), strict=False)):
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
            [unit + 0.15 * index for unit, _ in values], [value for _, (value, _) in values], [error for _, (_, error) in values],
            color=colour, marker="o", linestyle="none", capsize=3, label=name,
        )  # fmt: skip
    _dress(left, "Bias of the mean gradient", "batches averaged")
    left.set(xscale="log", yscale="log", ylabel="relative to the dense gradient's norm")
    left.autoscale()
    ticks = sorted({size for points in by_batches.values() for size, _ in points})
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    _dress(right, "Estimated bias of each unit", "unit, in the model's order")
    right.set(ylabel="", xlim=(-0.6, max(map(len, by_unit.values())) - 0.4), ylim=(0, None))
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, format="png")
    return path


def _palette(runs: int) -> Iterator[_Colours]:
    """Choose the colours: one for each kind of loss if there is one run, else one for each run."""
    if runs == 1:
        return iter([_Colours(*_COLOURS[:3])])
    return (_Colours(colour, colour, colour) for colour in itertools.cycle(_COLOURS))


def _matplotlib() -> tuple[Any, Any]:
    """Import the classes for figures and canvases.

    The import is here because it takes most of a second, and a run without plots does not need it.
    pyplot is not used, because it has global state.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs the package matplotlib; pip install matplotlib") from None
    return Figure, FigureCanvasAgg


def _token_unit(runs: Sequence[Run]) -> tuple[float, str]:
    most = max((line.get("tokens", 0) for run in runs for line in (*run.metrics, *run.evaluations)), default=0)
    return next(
        ((s, u) for s, u in ((1e9, "billions of tokens"), (1e6, "millions of tokens")) if most >= s),
        (1e3, "thousands of tokens"),
    )


def _draw(axes: Any, run: Run, colours: _Colours, scale: float) -> None:
    points = [(line.get("tokens", 0) / scale, line["loss"]) for line in run.metrics if line.get("loss") is not None]
    if points:
        tokens, losses = zip(*points, strict=True)
        axes.plot(tokens, losses, color=colours.training, alpha=0.22, linewidth=0.8)
        axes.plot(tokens, _smooth(losses), color=colours.training, zorder=2.5, **_SMOOTHED)
    held_out = [line for line in run.evaluations if line.get("loss") is not None]
    subnetworks = [
        (line.get("tokens", 0) / scale, loss)
        for line in held_out
        for loss in line.get("subnetwork_losses") or []
        if loss is not None
    ]
    for style, colour, marks in (
        (_SUBNETWORK, colours.subnetworks, subnetworks),
        (_FULL_MODEL, colours.held_out, [(line.get("tokens", 0) / scale, line["loss"]) for line in held_out]),
    ):
        if marks:
            axes.plot(*zip(*marks, strict=True), color=colour, clip_on=False, zorder=3, **style)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average the losses over a fortieth of the run around each step.

    At the start and the end of the run the average is over fewer steps. At the start the loss falls
    steeply.
    """
    sums = [0.0, *itertools.accumulate(losses)]
    half, last = len(losses) // 80, len(losses) - 1
    windows = ((max(0, index - half), index + min(half, index, last - index) + 1) for index in range(len(losses)))
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=15, loc="left", pad=12)
    axes.set_xlabel(unit, fontsize=12)
    axes.set_ylabel("loss, nats per token", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(True, color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)


def _legend(axes: Any, runs: Sequence[Run]) -> None:
    """Explain each kind of line and, for several runs, the colour and the last loss of each run."""
    from matplotlib.lines import Line2D

    single = len(runs) == 1
    kinds = _Colours(*_COLOURS[:3]) if single else _Colours(*["#555555"] * 3)
    entries = []
    if not single:
        for run, colours in zip(runs, _palette(len(runs)), strict=False):
            entries.append(Line2D([], [], color=colours.training, linewidth=5, label=run.name + _ending(run)))
    if any(run.metrics for run in runs):
        entries.append(Line2D([], [], color=kinds.training, label="training loss, smoothed", **_SMOOTHED))
    if any(run.evaluations for run in runs):
        ending = _ending(runs[0]) if single else ""
        entries.append(Line2D([], [], color=kinds.held_out, label=f"held-out, full model{ending}", **_FULL_MODEL))
    if any(line.get("subnetwork_losses") for run in runs for line in run.evaluations):
        entries.append(
            Line2D(
                [], [], color=kinds.subnetworks, label="held-out, each group's subnetwork, on its share", **_SUBNETWORK
            )
        )
    if entries:
        axes.legend(handles=entries, frameon=False, fontsize=11, loc="upper right")


def _ending(run: Run) -> str:
    last = run.evaluations[-1].get("loss") if run.evaluations else None
    return "" if last is None else f" ({last:.3f} at the end)"
