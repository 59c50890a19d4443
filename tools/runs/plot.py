"""Draws the loss curves of runs as PNG files, and has the style that all plots share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import ConfigError
from .run_files import Run, phases_of

SIZE_INCHES, DPI = (10.0, 6.25), 160  # 1600 × 1000 pixels
COLOURS = ("#0b62a4", "#c8531c", "#2e7d32", "#7b3fa0", "#8a6d00", "#a3195b")
_SMOOTHED: dict[str, Any] = {"linewidth": 1.8}
_FULL_MODEL: dict[str, Any] = {
    "marker": "o", "markersize": 8, "markeredgecolor": "white", "markeredgewidth": 1.2, "linewidth": 1.0,
    "linestyle": (0, (4, 2)),
}  # fmt: skip
_SUBNETWORK: dict[str, Any] = {
    "marker": "_",
    "markersize": 12,
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "alpha": 0.8,
}


class _Colours(NamedTuple):
    training: str
    held_out: str
    subnetworks: str


def plot_loss(runs: Sequence[Run], path: Path) -> Path:
    """Draw the losses of runs against tokens (or images) into the PNG ``path``, and return
    ``path``.

    Each run has its training loss, raw (light) and smoothed, and the held-out losses of the full
    model and of every group's subnetwork. Raises ConfigError if matplotlib is missing or ``path``
    cannot be written.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    images = bool(runs) and all(run.reads_images for run in runs)
    scale, unit = _unit(runs, "images" if images else "tokens")
    for run, colours in zip(runs, _palette(len(runs)), strict=False):
        _draw(axes, run, colours, scale)
    dress(axes, "Loss by run" if len(runs) > 1 else f"Loss of {plain(runs[0].name)}", unit, *["loss"] * images)
    _legend(axes, runs)
    return save_figure(figure, path)


def _palette(runs: int) -> Iterator[_Colours]:
    """Choose the colours: one for each kind of loss if there is one run, else one for each run."""
    if runs == 1:
        return iter([_Colours(*COLOURS[:3])])
    return (_Colours(colour, colour, colour) for colour in itertools.cycle(COLOURS))


def _unit(runs: Sequence[Run], counted: str) -> tuple[float, str]:
    most = max((line.get("tokens", 0) for run in runs for line in (*run.metrics, *run.evaluations)), default=0)
    return next(
        ((s, f"{u} of {counted}") for s, u in ((1e9, "billions"), (1e6, "millions")) if most >= s),
        (1e3, f"thousands of {counted}"),
    )


def _draw(axes: Any, run: Run, colours: _Colours, scale: float) -> None:
    points = [(line.get("tokens", 0) / scale, line["loss"]) for line in run.metrics if line.get("loss") is not None]
    if points:
        tokens, losses = zip(*points, strict=True)
        axes.plot(tokens, losses, color=colours.training, alpha=0.22, linewidth=0.8)
        axes.plot(tokens, _smooth(losses), color=colours.training, zorder=2.5, **_SMOOTHED)
    _mark_phases(axes, run, colours.training, scale)
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


def _mark_phases(axes: Any, run: Run, colour: str, scale: float) -> None:
    """Draw a line where the masking of a schedule changes, and name the new masking."""
    for phase in phases_of(run.metrics)[1:]:
        at = phase.tokens / scale
        axes.axvline(at, color=colour, linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(
            f" {phase.masking} masking",
            (at, 0.02),
            xycoords=("data", "axes fraction"),
            color=colour,
            fontsize=10,
            rotation=90,
            verticalalignment="bottom",
        )


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average the losses over a fortieth of the run around each step, or less at both ends."""
    sums = [0.0, *itertools.accumulate(losses)]
    half, last = len(losses) // 80, len(losses) - 1
    windows = ((max(0, index - half), index + min(half, index, last - index) + 1) for index in range(len(losses)))
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in windows]


def _legend(axes: Any, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    single = len(runs) == 1
    kinds = _Colours(*COLOURS[:3]) if single else _Colours(*["#555555"] * 3)
    entries = []
    if not single:
        for run, colours in zip(runs, _palette(len(runs)), strict=False):
            entries.append(Line2D([], [], color=colours.training, linewidth=5, label=plain(run.name) + _ending(run)))
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


def new_figure(size: tuple[float, float] = SIZE_INCHES) -> Any:
    """Return an empty figure of ``size`` in inches. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs the package matplotlib; pip install matplotlib") from None
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Escape a text of the user for a figure, because matplotlib reads ``$…$`` as a formula."""
    return text.replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> Path:
    """Write ``figure`` to the PNG ``path`` and return it. Raises ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{path}: the plot cannot be written ({error.strerror})") from None
    return path


def dress(axes: Any, title: str, unit: str, loss: str = "loss, nats per token") -> None:
    """Give a plot the title, labels and grid that all plots share.

    ``unit`` is the label of the horizontal axis, and ``loss`` is the label of the vertical axis.
    """
    axes.set_title(title, fontsize=15, loc="left", pad=12)
    axes.set_xlabel(unit, fontsize=12)
    axes.set_ylabel(loss, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(True, color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
