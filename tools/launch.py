"""``sdp launch``: start a run on this host or on several hosts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..engine.environment.detect import detect
from ..engine.errors import ConfigError, LaunchError, shorten
from .shared.arguments import port, positive_int
from .train.command import RESTARTS_HELP, parse

_LAUNCHERS = ("local", "deepspeed", "mpirun", "slurm")
_SBATCH_OPTIONS = ("partition", "account", "qos", "time", "constraint", "cpus-per-task")
# The launchers under which an option has an effect. Under another one it is an error.
_HOSTS, _SLURM = ("deepspeed", "mpirun"), ("slurm",)
_ELSEWHERE = (*_HOSTS, *_SLURM)
_MEANT_FOR = {
    "hostfile": _HOSTS, "include": _HOSTS, "exclude": _HOSTS, "master_addr": _HOSTS, "master_port": _HOSTS,
    "nodes": _ELSEWHERE, "python": _ELSEWHERE, "launcher_args": _ELSEWHERE,
    "mpi": ("mpirun",), "mpirun": ("mpirun",), "status": _SLURM,
    "container": _SLURM, "container_mounts": _SLURM, "signal_seconds": _SLURM, "cpu": _SLURM,
    **{name.replace("-", "_"): _SLURM for name in _SBATCH_OPTIONS},
}  # fmt: skip


# Defaults, which are set after the check for options without effect.
_DEFAULTS = {
    "include": "", "exclude": "", "mpirun": "mpirun", "launcher_args": "", "cpu": False, "signal_seconds": 300,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. CONFIG and all words after it are arguments of ``sdp train``."""
    parser.usage = "sdp launch --launcher {local,deepspeed,mpirun,slurm} [options] CONFIG [options of sdp train]"
    parser.add_argument("--launcher", choices=_LAUNCHERS, required=True, help="the program that starts the ranks")
    parser.add_argument("--nodes", metavar="N", type=positive_int, help="number of hosts (default: the whole hostfile)")
    parser.add_argument(
        "--gpus-per-node", metavar="G", type=positive_int, help="ranks on each host, one per GPU (default: all slots)"
    )
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set a variable in every rank (env.NAME); may be repeated; docs/clusters.md says which names are refused",
    )
    parser.add_argument("--restarts", metavar="N", type=positive_int, default=0, help=RESTARTS_HELP)
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    hosts = parser.add_argument_group("deepspeed and mpirun")
    hosts.add_argument("--hostfile", metavar="FILE", type=Path, help="file with lines such as: worker-0 slots=4")
    hosts.add_argument("--include", metavar="SPEC", help="use only these hosts and slots: worker-0@worker-1:0,2")
    hosts.add_argument("--exclude", metavar="SPEC", help="use all hosts and slots except these")
    hosts.add_argument("--master-addr", metavar="HOST", help="address of rank 0 (default: the first host)")
    hosts.add_argument("--master-port", metavar="PORT", type=port, help="port of rank 0 (default: 29500)")
    hosts.add_argument(
        "--mpi",
        choices=("openmpi", "mpich", "intel"),
        help="the MPI that mpirun belongs to (default: what mpirun --version says)",
    )
    hosts.add_argument("--mpirun", metavar="PROGRAM", help="name or path of mpirun (default: mpirun)")
    hosts.add_argument("--python", metavar="PATH", help="path of Python on the hosts (default: the path on this host)")
    hosts.add_argument("--launcher-args", metavar="WORDS", help="options for the launcher itself, as one quoted word")
    jobs = parser.add_argument_group("slurm")
    for name in _SBATCH_OPTIONS:
        jobs.add_argument(f"--{name}", metavar="VALUE", help=f"sbatch's --{name}")
    jobs.add_argument("--cpu", action="store_true", default=None, help="ask for no GPUs, and run the ranks on CPUs")
    jobs.add_argument("--container", metavar="IMAGE", help="run the ranks in this container image, with pyxis")
    jobs.add_argument("--container-mounts", metavar="SRC:DST,…", help="mounts in addition to the working directory")
    jobs.add_argument(
        "--signal-seconds",
        metavar="S",
        type=positive_int,
        help="write a checkpoint and requeue the job so many seconds before its time limit (default: 300)",
    )
    jobs.add_argument(
        "--status",
        metavar="DIR",
        type=Path,
        help="print the state of the last job of the dump directory DIR, and start nothing",
    )
    parser.add_argument(
        "words", metavar="CONFIG …", nargs=argparse.REMAINDER, help="the run's JSON file, then options of sdp train"
    )


def run(args: argparse.Namespace) -> int:
    """Check the arguments of ``sdp train`` on this host, and then start it on every rank."""
    from ..engine.config.load import load_config
    from ..launcher.cluster.launch import launch
    from ..launcher.cluster.slurm import status
    from ..launcher.degrees import Degrees
    from ..models.sections import check_names

    _check(args)
    if args.status is not None:
        print(status(args.status))
        return 0
    words = [*args.words, *(word for setting in args.env for word in ("--set", _env_override(setting)))]
    train = parse(words)
    if train.nproc is not None:
        raise ConfigError("--nproc: sdp launch chooses the number of processes; give --gpus-per-node before CONFIG")
    if train.restarts:
        raise ConfigError("--restarts: this is an option of sdp launch; give it before CONFIG")
    config = load_config(train.config, train.set)
    check_names(config)
    # Under these launchers, rank 0 has this host's dump directory. Without this check, a job would
    # find the mistake only after its time in the queue.
    if args.launcher in ("local", "slurm"):
        from .runs.run_files import require_no_other_run

        require_no_other_run(train.dump_dir, train.url, resume=train.resume)
    for name, value in _DEFAULTS.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    given = {option: getattr(args, option.replace("-", "_")) for option in _SBATCH_OPTIONS}
    args.sbatch = {option: value for option, value in given.items() if value is not None}
    return launch(args, ["train", *words], train.dump_dir, Degrees(config, train.fsdp))


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing or have no effect under the launcher.

    Raise LaunchError if a launcher has started this process.
    """
    for name, launchers in _MEANT_FOR.items():
        if getattr(args, name) is not None and args.launcher not in launchers:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} has no effect with --launcher {args.launcher}, only with {' or '.join(launchers)}; leave "
                "it out"
            )
    if args.status is not None:
        if args.words:
            raise ConfigError("--status starts nothing; leave CONFIG out")
        return
    if args.launcher in _HOSTS and args.hostfile is None:
        raise ConfigError(f"--launcher {args.launcher} needs --hostfile FILE with lines of the form: worker-0 slots=4")
    if args.launcher == "slurm" and args.gpus_per_node is None:
        raise ConfigError("--launcher slurm needs --gpus-per-node G, the number of ranks on each node")
    if not args.words:
        raise ConfigError("the following arguments are required: CONFIG; see sdp launch --help")
    if (started := detect()) is not None and not started.is_alone:
        raise LaunchError(
            f"{started.source} has started this process; use sdp train here, which becomes one of its ranks"
        )


def _env_override(setting: str) -> str:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"--env {shorten(setting)}: expected NAME=VALUE")
    return f"env.{name}={json.dumps(value)}"
