"""``sdp bench``: the engine against a plain loop, or methods of training side by side."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ...engine.config.schema import SDPSection
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError, LaunchError
from ...engine.placement.policies import place
from ...engine.placement.units import find_units
from . import side_by_side
from .contestants import llama_of
from .overhead import (
    _NUMBERS,
    DEEPSPEED_STAGES,
    _one_of_many,
    _one_of_many_by_neurons,
    _one_rank,
    _print_comparison,
    _print_settings,
    _require_neurons,
    _require_writable,
    _settings,
    _threads,
    _under_deepspeed,
    _world,
    add_plain_arguments,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    side_by_side.add_arguments(parser)
    add_plain_arguments(parser.add_argument_group("one rank against a hand-written loop, without CONFIG"))


def run(args: argparse.Namespace) -> int:
    """Time the comparisons and print them.

    Raises :class:`ConfigError` for sizes that make no model or placement, :class:`LaunchError` under a launcher of several ranks,
    and RuntimeError if engine and loop do not end with the same weights: then their times compare nothing.
    """
    _require_effect(args)
    if args.config is not None:
        return side_by_side.run(args)
    for name in _NUMBERS:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is not a positive whole number")
    found = detect()
    if found is not None and found.world_size > 1:
        raise LaunchError(
            f"sdp bench times one rank, but {found.source} started {found.world_size}; start it without a launcher"
        )
    placement = place(
        SDPSection(groups=args.groups, capacity=args.capacity, profile="uniform"),
        find_units(llama_of(args, args.layers), "auto"),
    )
    _require_neurons(args)
    _require_writable(args.json)
    settings, comparisons = _settings(args), []
    _print_settings(settings)
    with _threads(args.threads):
        for world, compare in ((1, _one_rank), (args.groups, _one_of_many), (args.groups, _one_of_many_by_neurons)):
            with _world(world):
                comparisons.append(compare(args, placement))
            _print_comparison(comparisons[-1])
        for stage in DEEPSPEED_STAGES if args.deepspeed else ():
            with _world(1):
                comparisons.append(_under_deepspeed(args, stage))
            _print_comparison(comparisons[-1])
    if args.json:
        report = {"settings": settings, "comparisons": [asdict(one) | {"reached": one.reached} for one in comparisons]}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _require_effect(args: argparse.Namespace) -> None:
    """Options of the one comparison mean nothing in the other."""
    plain, beside = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_plain_arguments(plain)
    side_by_side.add_arguments(beside)
    parser, instead = (
        (plain, "has no effect with CONFIG, which says it")
        if args.config
        else (beside, "needs a CONFIG to compare methods on")
    )
    for action in parser._actions:
        if action.dest not in ("help", "config") and getattr(args, action.dest) != action.default:
            raise ConfigError(f"{action.option_strings[0]}: {instead}; leave it out")
