"""``sdp report DIR…``: compares the costs and the losses of runs with those of the dense model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...engine.errors import MOST_MESSAGE, escape, shorten
from ..runs.plot import plot_loss
from ..runs.run_files import read_run
from .render import as_json, render, render_markdown


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
    runs = [read_run(path) for path in args.runs]
    if args.plot is not None:
        plot_loss(runs, args.plot)
    if args.json:
        print(json.dumps(as_json(runs), indent=2))
        return 0
    print(escape(render_markdown(runs) if args.markdown else render(runs)))
    if args.plot is not None:
        print(f"plot of all runs: {shorten(args.plot, MOST_MESSAGE)}")
    return 0
