"""The options of ``sdp bench``, as they were given and checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ..shared.arguments import add_config_arguments, require_between_1_and

DEFAULT_OUT = Path("runs/bench")
_MOST = 2**20  # rounds or steps
_MOST_RANKS = 2**12  # that one machine can start


@dataclass(frozen=True)
class BenchOptions:
    """The options, by their names.

    Attributes:
        config: The file.
        settings: What ``--set`` changes in it.
        argv: The command line, which the ranks are started with.
        alone: Whether one rank's share is measured, on one device.
        nproc: Ranks to start; with ``alone``, ranks of the run that is imagined. None: as many as
            the groups and the tensor parallelism need.
        methods: Their names, or None for all that can run.
        rounds: Turns of every method.
        steps: Timed steps of a turn.
        out: The folder of the report.
    """

    config: Path
    settings: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    alone: bool = False
    nproc: int | None = None
    methods: tuple[str, ...] | None = None
    rounds: int = 5
    steps: int = 2
    out: Path = DEFAULT_OUT

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchOptions:
        """Take the parsed arguments. Raises :class:`ConfigError` for a number out of range."""
        if args.nproc is not None:
            require_between_1_and(_MOST_RANKS, "--nproc", args.nproc)
        if args.alone and args.methods is not None:
            raise ConfigError("--methods: --alone measures the dense model, and SDP as CONFIG says; leave it out")
        return cls(
            config=args.config,
            settings=tuple(args.set),
            argv=tuple(args.argv),
            alone=args.alone,
            nproc=args.nproc,
            methods=None if args.methods is None else tuple(dict.fromkeys(args.methods.split(","))),
            rounds=require_between_1_and(_MOST, "--rounds", args.rounds),
            steps=require_between_1_and(_MOST, "--steps", args.steps),
            out=args.out,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "compare ways to train this model")
    parser.add_argument(
        "--alone", action="store_true", help="measure one rank's share on one device: memory, tokens/s, MFU"
    )
    parser.add_argument("--nproc", metavar="P", type=int, help="ranks to start here (default: sdp.groups)")
    parser.add_argument(
        "--methods", metavar="A,B,…", help="some of ddp … diloco, sdp, sdp-block-forward-0.5 … (default: all)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="turns of every method (default: 5)")
    parser.add_argument("--steps", metavar="N", type=int, default=2, help="timed steps of a turn (default: 2)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=DEFAULT_OUT,
        help=f"folder for report.md, report.json and the plot (default: {DEFAULT_OUT})",
    )  # fmt: skip
