"""The options of ``sdp gradient-bias``, as they were given and checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ..shared.arguments import add_config_arguments
from .estimate import FEWEST

BATCHES = 16


@dataclass(frozen=True)
class BiasOptions:
    """The measurements to make, and where the results go. The fields have the names of the
    options.
    """

    config: Path
    settings: tuple[str, ...]
    checkpoint: Path | None
    batches: int
    same_data: bool
    json: Path | None
    out: Path

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BiasOptions:
        """Take the parsed arguments. Raises :class:`ConfigError` if there are too few batches."""
        if args.batches < FEWEST:
            raise ConfigError(f"--batches {args.batches}: at least {FEWEST} are needed to tell bias from noise")
        return cls(
            config=args.config,
            settings=tuple(args.set),
            checkpoint=args.checkpoint,
            batches=args.batches,
            same_data=args.same_data,
            json=args.json,
            out=args.out or Path("runs") / f"{args.config.stem}-gradient-bias",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the JSON file whose model, placement and data are used")
    parser.add_argument(
        "--checkpoint", metavar="RUN", type=Path, help="take weights and data of this run, or of one checkpoint of it"
    )
    parser.add_argument(
        "--batches", metavar="N", type=int, default=BATCHES, help=f"independent batches (default: {BATCHES})"
    )
    parser.add_argument(
        "--same-data", action="store_true", help="every group reads the same rows, so that only masking differs"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every figure there")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where table, plot and, if none is named, data go (default: runs/NAME-gradient-bias)",
    )
