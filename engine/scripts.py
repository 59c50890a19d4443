"""What a DeepSpeed script calls before it has an engine, under DeepSpeed's own names and arguments."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``, which :func:`sdp.initialize` reads from ``args``; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration, as DeepSpeed names it")
    group.add_argument("--deepspeed", action="store_true", help="accepted as DeepSpeed's scripts have it; sdp is used either way")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="JSON file of DeepSpeed's keys, and a section sdp")
    return parser
