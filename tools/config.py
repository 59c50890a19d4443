"""``sdp config``: print a configuration with all defaults, or the schema."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import ConfigError
from .shared.arguments import add_config_arguments
from .shared.config_checks import check_names


@dataclass(frozen=True)
class ConfigOptions:
    """The arguments of ``sdp config``.

    Attributes:
        config: the JSON file to resolve, or None to print the schema.
        overrides: changes of ``config``, in the form of ``--set``.
    """

    config: Path | None
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ConfigOptions:
        """The options in what :func:`add_arguments` has put into ``args``. Raises ConfigError."""
        if args.schema == (args.config is not None):
            raise ConfigError("give either a CONFIG to resolve or --schema; see sdp config --help")
        return cls(args.config, tuple(args.set))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the JSON file to resolve", nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of all keys instead")


def run(args: argparse.Namespace) -> int:
    """Print the configuration or the schema as JSON. Raises ConfigError."""
    from ..engine.config.load import json_schema, load_config

    options = ConfigOptions.from_args(args)
    if options.config is None:
        shown = json_schema()
    else:
        config = load_config(options.config, options.overrides)
        check_names(config)
        shown = config.resolved()
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0
