"""``sdp bench``: compares ways to train a model side by side, or the engine with a hand-written
loop.
"""

from __future__ import annotations

import argparse

from . import overhead, side_by_side
from .options import MethodOptions, PlainOptions, add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure and print one of the two comparisons: with CONFIG the methods, else the engine."""
    if args.config is not None:
        return side_by_side.run(MethodOptions.from_args(args))
    return overhead.run(PlainOptions.from_args(args))
