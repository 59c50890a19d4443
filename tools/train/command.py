"""``sdp train``: start the ranks of a run on this machine, or be one of them."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.environment.detect import Supervision, detect, export
from ...engine.errors import ConfigError
from ...launcher.supervision import report_fatal
from ..shared.arguments import add_config_arguments, positive_int

if TYPE_CHECKING:
    from ...engine.config.schema import Config


STOP_SECONDS = 300.0  # from a signal to the command until its ranks are killed: the step at hand, and a checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the run's JSON file")
    parser.add_argument("--groups", metavar="N", type=positive_int, help="SDP groups (sdp.groups)")
    parser.add_argument(
        "--fsdp", metavar="F", type=positive_int, help="ranks that share a group's state (default: what is left)"
    )
    parser.add_argument(
        "--tp", metavar="T", type=positive_int, help="tensor-parallel degree (tensor_parallel.autotp_size)"
    )
    parser.add_argument("--nproc", metavar="P", type=positive_int, help="processes to start here where no launcher did")
    parser.add_argument(
        "--dump-dir", metavar="DIR", type=Path, help="where the run's files go (default: runs/NAME of CONFIG)"
    )
    parser.add_argument(
        "--init-from",
        metavar="DIR",
        type=Path,
        help="start from the Hugging Face LLaMA or DeepSpeed checkpoint in DIR (training.init_from)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the dump directory"
    )
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        nargs="?",
        const="3-5",
        help="record these steps of rank 0 in DIR/profile (default: 3-5)",
    )


def run(args: argparse.Namespace) -> int:
    """Train in this process where a launcher started it, or where one process is enough; else start the processes.

    Adds to ``args``, for ``tools.train``: ``overrides``, all that changes CONFIG in the form of ``--set``, ``on_stall`` and ``guarded``.
    """
    from ...engine.config.load import load_config
    from ...launcher.degrees import Degrees, visible_devices

    complete_arguments(args)
    config = load_config(args.config, args.overrides)
    export(
        {name: str(value) for name, value in config.env.items()}
    )  # before torch is imported, and for the processes started here
    degrees = Degrees(config, args.fsdp)
    args.on_stall, args.guarded = partial(_end_stalled, args.above), args.above is None
    place = detect()
    if place is not None:
        if args.nproc not in (None, place.world_size):
            raise ConfigError(
                f"--nproc {args.nproc}: {place.source} started {place.world_size} processes; leave it out"
            )
        degrees.check(place.world_size, place.source)
        from .rank import run as run_rank

        return run_rank(args)
    devices = visible_devices()
    processes = degrees.processes(args.nproc, devices)
    if processes > 1:
        from ...launcher.local import start_local

        _check_files(config, args)
        return start_local(args.argv, processes, args.dump_dir / "logs", on_cpu=devices == 0, stop_seconds=STOP_SECONDS)
    from ...launcher.local import become_single

    become_single(on_cpu=devices == 0)
    from .rank import run as run_rank

    return run_rank(args)


def _check_files(config: Config, args: argparse.Namespace) -> None:
    """Find here, once, what every rank would find only after it has imported torch: another run in the dump directory, no data."""
    from ..runs.run_files import require_no_other_run

    require_no_other_run(args.dump_dir, resume=args.resume)
    if config.data.name is None and config.data.path is not None:
        from ...data.index import load_index

        load_index(config.data.path)


def complete_arguments(args: argparse.Namespace) -> None:
    args.overrides = [*args.set]
    args.overrides += [f"sdp.groups={args.groups}"] if args.groups else []
    args.overrides += [f"tensor_parallel.autotp_size={args.tp}"] if args.tp else []
    args.overrides += [f"training.init_from={json.dumps(str(args.init_from))}"] if args.init_from else []
    args.dump_dir = args.dump_dir or Path("runs") / args.config.stem


def _end_stalled(above: Supervision | None, text: str) -> None:
    """End this process from whatever thread finds that it makes no progress; its main thread may never return."""
    report_fatal(f"sdp: error: {text}", 1, above, stalled=True)
    os._exit(1)
