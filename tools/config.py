"""``sdp config``: print a configuration with all defaults, or the schema."""

from __future__ import annotations

import argparse
import json

from ..engine.errors import ConfigError
from ..models.sections import check_names
from .shared.arguments import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the run's JSON file", nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of all keys instead")


def run(args: argparse.Namespace) -> int:
    """Print the configuration or the schema as JSON. Raises ConfigError."""
    from ..engine.config.load import json_schema, load_config

    if args.schema == (args.config is not None):
        raise ConfigError("give either a CONFIG to resolve or --schema; see sdp config --help")
    if args.schema:
        shown = json_schema()
    else:
        config = load_config(args.config, args.set)
        check_names(config)
        shown = config.resolved()
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0
