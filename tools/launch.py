"""``sdp launch``: start a run on several hosts."""

from __future__ import annotations

import argparse
import json

from ..engine.errors import ConfigError
from .shared.arguments import Parser
from .train.command import add_arguments as add_train_arguments
from .train.command import complete_arguments


def run(args: argparse.Namespace) -> int:
    """Find the mistakes in the words for ``sdp train`` here, once, and start it on every rank."""
    from ..engine.config.load import load_config
    from ..launcher.cluster.launch import check
    from ..launcher.cluster.launch import run as start
    from ..launcher.cluster.slurm import status
    from ..launcher.degrees import Degrees

    check(args)
    if args.status is not None:
        print(status(args.status))
        return 0
    parser = Parser(prog="sdp train")
    add_train_arguments(parser)
    words = [*args.words, *(word for setting in args.env for word in ("--set", _env_override(setting)))]
    train = parser.parse_args(words)
    if train.nproc is not None:
        raise ConfigError("--nproc: sdp launch counts the processes itself; give --gpus-per-node before CONFIG")
    complete_arguments(train)
    config = load_config(train.config, train.overrides)
    if args.launcher in (
        "local",
        "slurm",
    ):  # rank 0 has the dump directory of this host; a job would find so after its time in the queue
        from .runs.run_files import require_no_other_run

        require_no_other_run(train.dump_dir, resume=train.resume)
    return start(args, ["train", *words], train.dump_dir, Degrees(config, train.fsdp))


def _env_override(setting: str) -> str:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"--env {setting}: expected NAME=VALUE")
    return f"env.{name}={json.dumps(value)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..launcher.cluster.launch import add_arguments as add_launcher_arguments

    add_launcher_arguments(parser)
