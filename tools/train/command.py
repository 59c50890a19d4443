"""``sdp train``: start the ranks of a run on this machine, or be one of them."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ...engine.environment.detect import detect, export
from ...engine.errors import ConfigError
from ...launcher.fatal_errors import report_fatal
from .options import add_arguments as add_arguments
from .options import complete

if TYPE_CHECKING:
    from ...engine.config.schema import Config

# This long after a signal the ranks are killed. Until then they finish the current step and write a
# checkpoint.
STOP_SECONDS = 300.0


def run(args: argparse.Namespace) -> int:
    """Train in this process if a launcher started it, or if one process is enough.

    Otherwise start the processes.
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
                f"--nproc {options.nproc}: {environment.source} started {environment.world_size} processes; leave it "
                "out"
            )
        if options.restarts and environment.source != "sdp":
            raise ConfigError(
                f"--restarts {options.restarts}: {environment.source} started this process, and would have to start "
                "it again; use sdp launch --restarts"
            )
        degrees.check(environment.world_size, environment.source)
    from .rank import run as run_rank  # imports torch

    def end_stalled(text: str) -> None:
        """End this process from the thread that found no progress. The main thread may never
        return.
        """
        report_fatal(f"sdp: error: {text}", 1, options.above, stalled=True)
        os._exit(1)

    return run_rank(options, end_stalled)


def _serve_and_train(config: Config, options: argparse.Namespace) -> int:
    """Start the service of a run and all its groups on this host."""
    from ...launcher.degrees import Degrees, visible_devices
    from ...launcher.served import start_served

    if detect() is not None:
        raise ConfigError(
            "sdp.sync.service: a launcher started this process; start sdp serve, and each group as a launch of its own "
            "with sdp train --service HOST:PORT"
        )
    if options.url is not None:
        raise ConfigError(
            f"--dump-dir {options.url}: a run with sdp.sync.service keeps its files on disk; name a folder"
        )
    if options.restarts:
        raise ConfigError("--restarts: with sdp.sync.service, the file says how often (sdp.sync.service.restarts)")
    devices = visible_devices()
    processes = Degrees(config, options.fsdp).processes(options.nproc, devices)
    _check_files(config, options)
    words = [str(options.config), *(word for value in options.set for word in ("--set", value))]
    return start_served(config, words, options.dump_dir, processes // config.sdp.groups, on_cpu=devices == 0)


def _check_files(config: Config, options: argparse.Namespace) -> None:
    """Check once that names are known, that the dump directory has no other run, and that no data
    is missing.

    Without this check every rank would find these mistakes, but only after it has imported torch.
    """
    from ..runs.run_files import require_no_other_run
    from ..shared.config_checks import check_names

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
