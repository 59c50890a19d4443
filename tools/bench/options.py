"""The options of ``sdp bench``, as they were given and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError
from ..shared.arguments import add_config_arguments, require_between_1_and
from .networks import Link

DEFAULT_OUT = Path("runs/bench")
WORKERS = "--workers"

# Default, largest value and meaning of the numbers of the comparison without CONFIG.
_NUMBERS = {
    "layers": (8, 2**16, "layers of the full model"),
    "hidden": (384, 2**24, "hidden size"),
    "intermediate": (1024, 2**24, "feed-forward size"),
    "heads": (6, 2**24, "attention heads"),
    "vocab_size": (4096, 2**24, "tokens of the vocabulary"),
    "sequence": (256, 2**24, "tokens of a sequence"),
    "micro_batch": (4, 2**24, "sequences of a step"),
    "groups": (4, 2**20, "SDP groups, one of which is timed"),
    "neuron_groups": (4, 2**24, "groups of neurons in a branch"),
    "repeats": (15, 2**20, "timed steps of each side"),
    "warmup": (3, 2**20, "steps before the timed ones"),
    "threads": (1, 2**12, "threads of torch"),
}
_TURNS = {"rounds": (5, 2**20, "turns of every method"), "steps": (2, 2**20, "timed steps of a turn")}
_MOST_RANKS = 2**12  # that one machine can start
_MOST_ELEMENTS = 2**38  # of all weights, or of a batch's tokens: a terabyte in float32


@dataclass(frozen=True)
class PlainOptions:
    """One rank against a hand-written loop. The fields have the names of the options."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab_size: int
    sequence: int
    micro_batch: int
    groups: int
    neuron_groups: int
    repeats: int
    warmup: int
    threads: int
    capacity: float
    compile: bool
    deepspeed: bool
    json: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlainOptions:
        """Take the parsed arguments.

        Raises :class:`ConfigError` for an option of the other comparison.
        """
        _require_defaults(args, _side_by_side_defaults(), "needs a CONFIG to compare methods on")
        numbers = {
            name: require_between_1_and(most, _option(name), getattr(args, name))
            for name, (_, most, _) in _NUMBERS.items()
        }
        options = cls(**numbers, capacity=args.capacity, compile=args.compile, deepspeed=args.deepspeed, json=args.json)
        if options.weights > _MOST_ELEMENTS:
            raise ConfigError(
                f"--layers, --hidden, --intermediate, --vocab-size: {options.weights:,} weights; at most "
                f"{_MOST_ELEMENTS:,} are timed"
            )
        if options.sequence * options.micro_batch * options.vocab_size > _MOST_ELEMENTS:
            raise ConfigError(
                f"--micro-batch, --sequence, --vocab-size: their product is the size of the logits; at most "
                f"{_MOST_ELEMENTS:,} are computed"
            )
        return options

    @property
    def weights(self) -> int:
        """Roughly the number of weights of the full model."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocab_size * self.hidden

    @property
    def numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _NUMBERS}


@dataclass(frozen=True)
class MethodOptions:
    """Methods side by side, with CONFIG.

    Attributes:
        config: The file.
        settings: What ``--set`` changes in it.
        argv: The command line, which the ranks are started with.
        nproc: Ranks to start. None: as many as groups.
        workers: The text of ``--workers``, if there is one.
        methods: Their names, or None for all that can run.
        rounds: Turns of every method.
        steps: Timed steps of a turn.
        links: Rates of the links between ranks, which are then hosts. Empty: plain processes.
        hosts: The name of the hosts that were made. Only ranks are given it.
        out: The folder of the report.
    """

    config: Path
    settings: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    nproc: int | None = None
    workers: str | None = None
    methods: tuple[str, ...] | None = None
    rounds: int = 5
    steps: int = 2
    links: tuple[Link, ...] = ()
    hosts: str | None = None
    out: Path = DEFAULT_OUT

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> MethodOptions:
        """Take the parsed arguments.

        Raises :class:`ConfigError` for an option of the other comparison.
        """
        _require_defaults(args, _plain_defaults(), "has no effect with CONFIG, which says it")
        if args.nproc is not None:
            require_between_1_and(_MOST_RANKS, "--nproc", args.nproc)
        return cls(
            config=args.config,
            settings=tuple(args.set),
            argv=tuple(args.argv),
            nproc=args.nproc,
            workers=args.workers,
            methods=None if args.methods is None else tuple(dict.fromkeys(args.methods.split(","))),
            rounds=require_between_1_and(_TURNS["rounds"][1], "--rounds", args.rounds),
            steps=require_between_1_and(_TURNS["steps"][1], "--steps", args.steps),
            links=() if args.network is None else tuple(Link.parse(rate) for rate in args.network.split(",")),
            hosts=args.hosts,
            out=args.out or DEFAULT_OUT,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of both comparisons."""
    add_method_arguments(parser.add_argument_group("side by side, with CONFIG"))
    add_plain_arguments(parser.add_argument_group("one rank against a hand-written loop, without CONFIG"))


def add_method_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options of the comparison with CONFIG."""
    add_config_arguments(parser, "compare ways to train this model, on several ranks", nargs="?")
    parser.add_argument("--nproc", metavar="P", type=int, help="ranks to start here (default: sdp.groups)")
    parser.add_argument(
        WORKERS, metavar="N,…", help="compare once for each number of ranks, with as many groups, such as 2,4,8"
    )
    parser.add_argument(
        "--methods", metavar="A,B,…", help="some of ddp … diloco, sdp, sdp-block-forward-0.5 … (default: all)"
    )
    for name, (default, _, text) in _TURNS.items():
        parser.add_argument(f"--{name}", metavar="N", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--network",
        metavar="RATE,…",
        help="ranks are hosts with links of these rates, such as 100mbit,300mbit,1gbit (needs root)",
    )
    parser.add_argument("--hosts", metavar="NAME", help=argparse.SUPPRESS)  # the command gives it to its ranks
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help=f"folder for report.md, report.json and plots (default: {DEFAULT_OUT})"
    )


def add_plain_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options of the comparison without CONFIG."""
    for name, (default, _, text) in _NUMBERS.items():
        parser.add_argument(_option(name), type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--compile", action="store_true", help="also time the engine with compiled units (training.compile)"
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="also time one group under DeepSpeed against DeepSpeed alone"
    )
    parser.add_argument(
        "--capacity", type=float, default=0.5, metavar="C", help="held fraction of the layers, or neurons (0.5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the settings and every timing there")


def _plain_defaults() -> dict[str, object]:
    parser = argparse.ArgumentParser(add_help=False)
    add_plain_arguments(parser)
    return vars(parser.parse_args([]))


def _side_by_side_defaults() -> dict[str, object]:
    parser = argparse.ArgumentParser(add_help=False)
    add_method_arguments(parser)
    return vars(parser.parse_args([]))


def _require_defaults(args: argparse.Namespace, defaults: Mapping[str, object], reason: str) -> None:
    """Refuse an option that was given, but belongs to the other comparison."""
    given = (name for name, default in defaults.items() if name != "config" and getattr(args, name) != default)
    if (name := next(given, None)) is not None:
        raise ConfigError(f"{_option(name)}: {reason}; leave it out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
