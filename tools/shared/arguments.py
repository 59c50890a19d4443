"""Command-line options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...engine.errors import ConfigError, quote, shorten
from .quantities import parse_size

SET_HELP = "override a key of CONFIG; may be repeated"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake as one line, and ends with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        message = " ".join(shorten(word, 300) for word in message.split())  # it repeats words of the command line
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_config_arguments(parser: argparse._ActionsContainer, config_help: str, nargs: str | None = None) -> None:
    """Declare the argument CONFIG and the option ``--set``."""
    parser.add_argument("config", metavar="CONFIG", type=Path, nargs=nargs, help=config_help)
    add_set_option(parser)


def add_set_option(parser: argparse._ActionsContainer, help_text: str = SET_HELP) -> None:
    """Declare ``--set SECTION.KEY=VALUE``. The parsed values are the list ``args.set``."""
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help=help_text)


def positive_int(text: str, most: int = 10**18 - 1) -> int:
    """Convert an argument to a whole number from 1 to ``most``, as a ``type`` of argparse."""
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a positive whole number")
    if len(text) > 18 or int(text) > most:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is too large; the most is {most:,}")
    return int(text)


def port(text: str) -> int:
    """Convert an argument to a TCP port, as a ``type`` of argparse."""
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a port; use a number from 1 to 65535")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Convert a size such as ``500MB`` or ``500000`` to bytes, as a ``type`` of argparse."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def split_set_values(argv: Sequence[str]) -> list[str]:
    """Turn ``--set a=1 b=2`` into ``--set a=1 --set b=2``, so that ``--set`` can have several
    values.

    A list of argparse (``nargs="+"``) would also take the CONFIG that follows.
    """
    split: list[str] = []
    setting = False
    for word in argv:
        is_value = setting and "=" in word and not word.startswith("-")
        if is_value and split[-1] != "--set":
            split.append("--set")
        setting = word == "--set" or is_value
        split.append(word)
    return split
