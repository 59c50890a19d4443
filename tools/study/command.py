"""``sdp study``: experiments over many configurations.

- ``sdp study grid GRID OUT``: train the cells of a table, each over several seeds.
- ``sdp study memory OUT``: bytes per rank by kind, planned and measured.
- ``sdp study profiles OUT``: which profile of holders over depth learns best at equal memory.
"""

from __future__ import annotations

import argparse

from . import grid, memory, profiles

_STUDIES = {"grid": grid, "memory": memory, "profiles": profiles}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a sub-command for each study."""
    studies = parser.add_subparsers(dest="study", metavar="STUDY", required=True)
    for name, module in _STUDIES.items():
        text = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        module.add_arguments(studies.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the study, and return its exit code."""
    return _STUDIES[args.study].run(args)
