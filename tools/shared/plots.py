"""How plots look. All are PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError

SIZE_INCHES, DPI = (10.0, 6.25), 160  # 1600 × 1000 pixels
COLOURS = ("#0b62a4", "#c8531c", "#2e7d32", "#7b3fa0", "#8a6d00", "#a3195b")


def new_figure(size: tuple[float, float] = SIZE_INCHES) -> Any:
    """Return an empty figure of ``size`` in inches. Raises ConfigError if matplotlib is missing.

    The import is here because it takes most of a second, and a run without plots does not need it.
    pyplot is not used, because it has global state.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs the package matplotlib; pip install matplotlib") from None
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Return a text of the user for a figure.

    matplotlib takes what is between two ``$`` for a formula.
    """
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
    """Give the axes of a plot their title, labels and grid.

    ``unit``: the label of the horizontal axis. ``loss``: that of the vertical one.
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
