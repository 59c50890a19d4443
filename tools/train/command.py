"""``sdp train``: start the ranks of a run on this machine, or be one of them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.environment.detect import detect, export
from ...engine.errors import ConfigError
from ...engine.object_store import is_url, local_copy
from ...launcher.fatal_errors import report_fatal
from ..shared.arguments import Parser, add_config_arguments, positive_int

if TYPE_CHECKING:
    from ...engine.config.schema import Config

# So long after a signal, ranks that still run are killed. They need the time for a checkpoint.
STOP_SECONDS = 300.0
RESTARTS_HELP = "after the loss of a rank or host, start again from the newest checkpoint, up to N times (default: 0)"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of ``sdp train`` and :func:`complete` them. Raises ConfigError."""
    parser = Parser(prog="sdp train")
    add_arguments(parser)
    return complete(parser.parse_args(words, argparse.Namespace(argv=["train", *words], above=None)))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Complete the parsed arguments of ``sdp train``, and return them.

    - ``set`` gets the options that change the configuration, such as ``--groups``.
    - ``dump_dir`` becomes the run's folder on this host.
    - ``url`` becomes the URL of the folder's copy in an object store. Without a copy, it is None.
    - ``checkpoints`` becomes the folder or the URL of the checkpoints.
    """
    if args.check and (ignored := [f"--{name}" for name in ("resume", "profile", "service") if getattr(args, name)]):
        raise ConfigError(f"--check: trains nothing, so {ignored[0]} has no effect; leave it out")
    args.set += [f"sdp.groups={args.groups}"] if args.groups else []
    args.set += [f"tensor_parallel.autotp_size={args.tp}"] if args.tp else []
    args.set += [f"training.init_from={json.dumps(str(args.init_from))}"] if args.init_from else []
    args.url = args.dump_dir.rstrip("/") if args.dump_dir is not None and is_url(args.dump_dir) else None
    folder = Path(args.dump_dir or Path("runs") / args.config.stem)
    args.dump_dir = folder if args.url is None else local_copy(f"runs/{args.url}")
    args.checkpoints = args.dump_dir / "checkpoints" if args.url is None else f"{args.url}/checkpoints"
    return args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the run's JSON file")
    parser.add_argument("--groups", metavar="N", type=positive_int, help="number of SDP groups (sdp.groups)")
    parser.add_argument(
        "--fsdp",
        metavar="F",
        type=positive_int,
        help="ranks that share a group's state (default: ranks / (groups * tp))",
    )
    parser.add_argument(
        "--tp", metavar="T", type=positive_int, help="tensor-parallel degree (tensor_parallel.autotp_size)"
    )
    parser.add_argument(
        "--nproc", metavar="P", type=positive_int, help="number of ranks to start on this host, without a launcher"
    )
    parser.add_argument(
        "--dump-dir", metavar="DIR", help="directory or s3://… for the run's files (default: runs/NAME for NAME.json)"
    )
    parser.add_argument(
        "--init-from", metavar="DIR", type=Path, help="start from the Hugging Face model in DIR (training.init_from)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the dump directory"
    )
    parser.add_argument("--restarts", metavar="N", type=positive_int, default=0, help=RESTARTS_HELP)
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        nargs="?",
        const="3-5",
        help="profile these steps of rank 0, in the folder profile of the dump directory (default: 3-5)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not train, but compare some steps with plain torch, and holders with each other",
    )
    parser.add_argument(
        "--service", metavar="HOST:PORT", help="train as one group of a run whose service (sdp serve) is at HOST:PORT"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="file with the service's secret (or set SDP_SERVICE_TOKEN)"
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        type=Path,
        help="encrypt the connection to the service, and trust the certificates in FILE",
    )


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code.

    This process trains if a launcher started it, or if one process is enough. Otherwise it starts
    the processes of the run and waits for them.
    """
    from ...engine.config.load import load_config
    from ...launcher.degrees import Degrees, visible_devices

    options = complete(args)
    config = load_config(options.config, options.set)
    # Before torch is imported, and for the processes that are started here.
    export({name: str(value) for name, value in config.env.items()})
    degrees = Degrees(config, options.fsdp, alone=options.service is not None)
    environment = detect()
    if options.service is None and config.sdp.sync is not None and config.sdp.sync.service is not None:
        return _serve_and_train(config, options)
    starts_more = (options.nproc or degrees.fewest) > 1 or options.restarts
    if environment is None or (environment.is_alone and starts_more):
        from ...launcher.local import become_single, start_local

        devices = visible_devices()
        processes = degrees.processes(options.nproc, devices)
        if processes > 1 or options.restarts:
            _check_files(config, options)
            return start_local(
                options.argv,
                processes,
                options.dump_dir / "logs",
                on_cpu=devices == 0,
                stop_seconds=STOP_SECONDS,
                restarts=options.restarts,
            )
        become_single()
    else:
        if options.nproc not in (None, environment.world_size):
            raise ConfigError(
                f"--nproc {options.nproc}: {environment.source} has already started {environment.world_size} "
                "processes; leave --nproc out"
            )
        if options.restarts and environment.source != "sdp":
            raise ConfigError(
                f"--restarts {options.restarts}: {environment.source} started this process, so only it could start "
                "the run again; use sdp launch --restarts"
            )
        degrees.check(environment.world_size, environment.source)
    from .rank import run as run_rank  # imports torch

    def end_stalled(text: str) -> None:
        """End this process from another thread, because the main thread may hang forever."""
        report_fatal(f"sdp: error: {text}", 1, options.above, stalled=True)
        os._exit(1)

    return run_rank(options, end_stalled)


def _serve_and_train(config: Config, options: argparse.Namespace) -> int:
    from ...launcher.degrees import Degrees, visible_devices
    from ...launcher.served import start_served

    if detect() is not None:
        raise ConfigError(
            "sdp.sync.service: a launcher started this process; start sdp serve, and then each group with sdp train "
            "--service HOST:PORT"
        )
    if options.check:
        raise ConfigError("--check: a run with a service cannot be checked; add --set sdp.sync.service=null")
    if options.url is not None:
        raise ConfigError(
            f"--dump-dir {options.url}: the files of a run with sdp.sync.service must be on disk; name a folder"
        )
    if options.restarts:
        raise ConfigError("--restarts: with sdp.sync.service, set sdp.sync.service.restarts in place of this option")
    devices = visible_devices()
    processes = Degrees(config, options.fsdp).processes(options.nproc, devices)
    _check_files(config, options)
    words = [str(options.config), *(word for value in options.set for word in ("--set", value))]
    return start_served(config, words, options.dump_dir, processes // config.sdp.groups, on_cpu=devices == 0)


def _check_files(config: Config, options: argparse.Namespace) -> None:
    """Check that names are known, that the dump directory has no other run, and that data exists.

    Every rank would find these mistakes, too, but only after it has imported torch.
    """
    from ...models.sections import check_names
    from ..runs.run_files import require_no_other_run

    check_names(config)
    # A group that is started again goes on with its files.
    require_no_other_run(options.dump_dir, options.url, resume=options.resume or options.service is not None)
    sources = [source.path for source in config.data.sources or ()]
    paths = sources if config.data.path is None else [config.data.path]
    if config.data.name is None and paths:
        from ...data.index import load_index
        from ..runs.dataset import corpus_folder, fetch_corpora

        fetch_corpora(config)
        for path in paths:
            load_index(corpus_folder(path))
