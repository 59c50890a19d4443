"""``sdp report DIR…``: compares the costs and the losses of runs with those of the dense model."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...engine.errors import MOST_MESSAGE, escape, shorten
from ..runs.plot import plot_loss
from ..runs.run_files import read_run
from .render import as_json, render, render_markdown


@dataclass(frozen=True)
class ReportOptions:
    """The arguments of ``sdp report``.

    Attributes:
        runs: the dump directories of the runs.
        style: the form of the report.
        plot: the PNG file for the losses of all runs, or None.
    """

    runs: tuple[Path, ...]
    style: Literal["text", "markdown", "json"] = "text"
    plot: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ReportOptions:
        """Make the options from the parsed arguments that :func:`add_arguments` declares."""
        style = "json" if args.json else "markdown" if args.markdown else "text"
        return cls(tuple(args.runs), style, args.plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="DIR",
        type=Path,
        help="the --dump-dir of a run; the others are compared with the first dense run",
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print a Markdown table")
    style.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes, seconds and tokens")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the losses of all runs into FILE (PNG)")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises ConfigError or DataError if a directory cannot be read."""
    options = ReportOptions.from_args(args)
    runs = [read_run(path) for path in options.runs]
    if options.plot is not None:
        plot_loss(runs, options.plot)
    if options.style == "json":
        print(json.dumps(as_json(runs), indent=2))
        return 0
    markdown = options.style == "markdown"
    print(escape(render_markdown(runs) if markdown else render(runs)))
    if options.plot is not None:
        print(f"plot of all runs: {shorten(options.plot, MOST_MESSAGE)}")
    return 0
