"""``sdp bench CONFIG``: measures ways to train a model side by side on your machines.

Every rank builds the model for all methods (DDP, FSDP2, SDP …) and trains them in turn. With
``--alone``, one process measures one rank's share instead.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.join import join
from ...engine.environment.detect import Environment, detect
from ...engine.errors import ConfigError
from ...launcher.degrees import visible_devices
from ...launcher.local import start_local
from ..runs.start_files import with_initial_model
from ..shared.arguments import add_config_arguments, positive_int
from . import alone
from .measure import measure
from .methods import DEFAULT, SDP, variant, why_not
from .report import REPORT, make_folder, plan_methods, rows_of, settings_of, write_report

DEFAULT_OUT = Path("runs/bench")
_MOST = 2**20  # rounds or steps
_MOST_RANKS = 2**12  # that one machine can start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the run's JSON file")
    parser.add_argument(
        "--alone", action="store_true", help="measure one rank's share on one device: memory, tokens/s, MFU"
    )
    ranks, turns = (partial(positive_int, most=most) for most in (_MOST_RANKS, _MOST))
    parser.add_argument("--nproc", metavar="P", type=ranks, help="number of ranks to start (default: sdp.groups)")
    parser.add_argument(
        "--methods", metavar="A,B,…", help=f"methods out of {', '.join((*DEFAULT, 'sdp'))} (default: all but sdp)"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=turns, default=5, help="number of turns of every method (default: 5)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=turns, default=2, help="number of timed steps in a turn (default: 2)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=DEFAULT_OUT,
        help=f"folder for report.md and report.json (default: {DEFAULT_OUT})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure the methods on all ranks, and write the report on rank 0.

    Without a launcher, this starts the ranks. Raises an :class:`SDPError` if a setting or a method
    cannot be compared.
    """
    if args.alone and args.methods is not None:
        raise ConfigError(
            "--methods: --alone always measures the dense model, and SDP as in CONFIG; leave --methods out"
        )
    environment = detect()
    is_first = environment is None or environment.rank == 0
    if is_first and (args.out / REPORT).exists():
        raise ConfigError(f"--out {args.out}: holds the report of an earlier run; name another directory")
    config = with_initial_model(load_config(args.config, args.set)).model_copy(update={"scheduler": None})
    if args.alone:
        return alone.run(args, config)
    world, names = _check(args, config, environment, speaks=is_first)
    if is_first:
        make_folder(args.out)
    if environment is None:
        argv = [*args.argv, "--nproc", str(world), "--methods", ",".join(names)]
        # Like a user's processes: the glibc settings that make resident memory exact also make it
        # slower.
        return start_local(argv, world, args.out / "logs", on_cpu=False)
    logging.getLogger("sdp").setLevel(logging.ERROR)  # without the notes about each method's configuration
    warnings.simplefilter("ignore", FutureWarning)  # torch and DeepSpeed call deprecated names of torch
    plans = plan_methods(names, config, world) if is_first else {}
    device = join()
    configs = {name: variant(name, config, world) for name in names}
    facts = measure(configs, config, device, args.rounds, args.steps)
    dist.destroy_process_group()
    if is_first:
        settings = settings_of(args, config, world, device)
        rows = rows_of(facts, plans, settings["batch"]["train"] * settings["tokens_per_sample"])
        write_report(args.out, settings, rows)
        print(f"sdp bench: the report is in {args.out}", file=sys.stderr, flush=True)
    return 0


def _check(
    args: argparse.Namespace, config: Config, environment: Environment | None, *, speaks: bool
) -> tuple[int, list[str]]:
    """Return the number of ranks, and the methods in order. Starts nothing.

    A rank that ``speaks`` says which methods are left out. Raises an :class:`SDPError` for what
    cannot be compared.
    """
    if config.bf16.enabled:
        raise ConfigError(
            "bf16.enabled: methods are compared in float32, in which all compute the same; add --set bf16.enabled=false"
        )
    if config.tensor_parallel.autotp_size > 1:
        raise ConfigError(
            "tensor_parallel.autotp_size: the dense methods are compared without tensor parallelism; add "
            "--set tensor_parallel.autotp_size=1"
        )
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" is not compared; add --set sdp.engine=fsdp2')
    if config.sdp.groups == 1:
        raise ConfigError("sdp.groups: with 1 group, SDP is the dense model; add --set sdp.groups=4")
    world = environment.world_size if environment is not None else args.nproc or config.sdp.groups
    asked = None if args.methods is None else list(dict.fromkeys(args.methods.split(",")))
    names = choose_methods(asked, config, world, speaks=speaks)
    if environment is None and 0 < (devices := visible_devices()) < world:
        raise ConfigError(
            f"{world} ranks: {devices} devices are visible; use fewer, or CUDA_VISIBLE_DEVICES= for the CPU"
        )
    return world, names


def choose_methods(asked: Sequence[str] | None, config: Config, world: int, *, speaks: bool) -> list[str]:
    """Choose the methods that are compared.

    Args:
        asked: The names in ``--methods``. If None, all default methods that can run.
        config: The configuration of the run.
        world: The number of ranks.
        speaks: Whether to print which methods are left out, and why.

    Raises:
        ConfigError: A method in ``asked`` cannot run, or no method of SDP can.
    """
    reasons = {name: why_not(name, config, world) for name in asked or DEFAULT}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if asked is not None and refused:
        name, reason = next(iter(refused.items()))
        raise ConfigError(f"--methods {name}: {reason}")
    of_sdp = [refused[name] for name in DEFAULT if name in SDP and name in refused]
    if asked is None and len(of_sdp) == 2:
        raise ConfigError(f"SDP cannot run on {world} ranks: {of_sdp[0]}")
    for name, reason in refused.items() if speaks else ():
        print(f"sdp bench: {name} is left out: {reason}", file=sys.stderr)
    return [name for name in reasons if name not in refused]
