"""``sdp bench CONFIG``: ways to train a model, measured side by side on the machines at hand."""

from __future__ import annotations

import argparse

from . import alone, side_by_side
from .options import BenchOptions, add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure and print, and return the exit code."""
    options = BenchOptions.from_args(args)
    return (alone if options.alone else side_by_side).run(options)
