"""The command-line options of ``python -m lab.overhead``, and their checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sdp.engine.errors import ConfigError
from sdp.tools.shared.arguments import positive_int

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
_MOST_ELEMENTS = 2**38  # of all weights, or of a batch's tokens: a terabyte in float32


@dataclass(frozen=True)
class PlainOptions:
    """The options of ``python -m lab.overhead``. The fields have the names of the options."""

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
        """Check the parsed arguments. Raises :class:`ConfigError` for a number out of range."""
        numbers = {name: getattr(args, name) for name in _NUMBERS}
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
        """The approximate number of weights of the full model."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocab_size * self.hidden

    @property
    def numbers(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _NUMBERS}


def add_plain_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of ``python -m lab.overhead`` to ``parser``."""
    for name, (default, most, text) in _NUMBERS.items():
        number, shown = partial(positive_int, most=most), f"{text} (default: {default})"
        parser.add_argument(_option(name), type=number, default=default, metavar="N", help=shown)
    parser.add_argument(
        "--compile", action="store_true", help="also time the engine with compiled units (training.compile)"
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="also time one group under DeepSpeed against DeepSpeed alone"
    )
    parser.add_argument(
        "--capacity", type=float, default=0.5, metavar="C", help="held fraction of the layers, or neurons (0.5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the settings and every timing to FILE")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
