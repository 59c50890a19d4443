"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...engine.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Wrong arguments are the user's mistake like any other: one line, exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def one_value_per_set(argv: Sequence[str]) -> list[str]:
    """``--set a=1 b=2`` as ``--set a=1 --set b=2``; argparse's own lists would swallow the CONFIG that follows."""
    spread: list[str] = []
    setting = False
    for word in argv:
        if setting and "=" in word and not word.startswith("-") and spread[-1] != "--set":
            spread.append("--set")
        setting = word == "--set" or (setting and "=" in word and not word.startswith("-"))
        spread.append(word)
    return spread


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def add_config_arguments(parser: argparse.ArgumentParser, config_help: str, nargs: str | None = None) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, nargs=nargs, help=config_help)
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a key of CONFIG; may be repeated",
    )
