"""``python -m lab.overhead``: the engine's seconds per step against those of a plain loop."""

from __future__ import annotations

import sys

from sdp.engine.errors import SDPError
from sdp.tools.shared.arguments import Parser

from . import compare
from .options import PlainOptions, add_plain_arguments


def main(argv: list[str] | None = None) -> int:
    """Time the comparisons and print them. Returns the exit code."""
    parser = Parser(prog="python -m lab.overhead", description=compare.__doc__)
    add_plain_arguments(parser)
    try:
        return compare.run(PlainOptions.from_args(parser.parse_args(argv)))
    except SDPError as error:
        print(f"lab.overhead: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
