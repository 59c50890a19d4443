"""``sdp launch``: the same ``sdp train`` with the same ranks, started on this host, through DeepSpeed's runner, mpirun or SLURM."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ...engine.distributed.hosts import split_tensor_group
from ...engine.environment.child import child_environment, variables_with
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError, LaunchError
from ..degrees import Degrees, visible_devices
from ..local import search_path
from . import slurm
from .commands import (
    SILENT_SECONDS,
    Start,
    deepspeed_command,
    flavour_of,
    mpirun_command,
    require,
    stop_command,
    train_command,
)
from .hosts import Host, check_host, describe, read_hostfile, select, world_size
from .watch import run_watched, tell_by, tell_by_mpirun

_LAUNCHERS = ("local", "deepspeed", "mpirun", "slurm")
_SBATCH_OPTIONS = ("partition", "account", "qos", "time", "constraint", "cpus-per-task")
# Which launchers an option has a meaning under; with another it is an error.
_HOSTS, _SLURM = ("deepspeed", "mpirun"), ("slurm",)
_ELSEWHERE = (*_HOSTS, *_SLURM)
_MEANT_FOR = {
    "hostfile": _HOSTS, "include": _HOSTS, "exclude": _HOSTS, "master_addr": _HOSTS, "master_port": _HOSTS,
    "nodes": _ELSEWHERE, "python": _ELSEWHERE, "launcher_args": _ELSEWHERE,
    "mpi": ("mpirun",), "mpirun": ("mpirun",), "status": _SLURM,
    "container": _SLURM, "container_mounts": _SLURM, "signal_seconds": _SLURM, "cpu": _SLURM,
    **{name.replace("-", "_"): _SLURM for name in _SBATCH_OPTIONS},
}  # fmt: skip


def _shortened(*options: str) -> str:
    """A pattern for the long ``options`` and what begins them and is three letters long at least."""
    return rf"--({'|'.join(dict.fromkeys(name[:end] for name in options for end in range(3, len(name) + 1)))})"


# Of the launchers themselves: options that change how many ranks there are, or where, behind the back of what was checked.
# sbatch and DeepSpeed take short ones with the value attached, and long ones cut short where that leaves no other.
_RANKS = {
    "slurm": re.compile(
        rf"-[Nna].*|{_shortened('nodes', 'ntasks', 'ntasks-per-node', 'tasks-per-node', 'array', 'gpus-per-node')}(=.*)?"
    ),
    "mpirun": re.compile(
        r"--?(n|np|N|npernode|npersocket|pernode|ppn|perhost|c|H|host|hosts|hostfile|machinefile|machine|f|default-hostfile|rf|rankfile"
        r"|rr|grr|app|configfile)(=.*)?|:"
    ),
    "deepspeed": re.compile(
        r"-[Hie].*|"
        rf"{_shortened('num_nodes', 'num_gpus', 'num_accelerators', 'hostfile', 'include', 'exclude', 'node_rank', 'no_ssh')}(=.*)?"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``sdp launch``; from CONFIG on, the words are those of ``sdp train``."""
    parser.usage = "sdp launch --launcher {local,deepspeed,mpirun,slurm} [options] CONFIG [options of sdp train]"
    parser.add_argument("--launcher", choices=_LAUNCHERS, required=True, help="what starts the processes")
    parser.add_argument("--nodes", metavar="N", type=_positive, help="how many hosts (default: all of the hostfile)")
    parser.add_argument(
        "--gpus-per-node", metavar="G", type=_positive, help="ranks on each host, one per GPU (default: all slots)"
    )
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable for every rank (env.NAME); repeatable",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
    hosts = parser.add_argument_group("deepspeed and mpirun")
    hosts.add_argument("--hostfile", metavar="FILE", type=Path, help="lines of the form: worker-0 slots=4")
    hosts.add_argument("--include", metavar="SPEC", help="use only these hosts and slots: worker-0@worker-1:0,2")
    hosts.add_argument("--exclude", metavar="SPEC", help="use all but these")
    hosts.add_argument("--master-addr", metavar="HOST", help="where the hosts reach rank 0 (default: the first host)")
    hosts.add_argument("--master-port", metavar="PORT", type=_positive, help="its port (default: 29500)")
    hosts.add_argument("--mpi", choices=("openmpi", "mpich", "intel"), help="whose mpirun it is (default: it is asked)")
    hosts.add_argument("--mpirun", metavar="PROGRAM", help="mpirun's name or path (default: mpirun)")
    hosts.add_argument("--python", metavar="PATH", help="the interpreter on the hosts (default: this one's path)")
    hosts.add_argument("--launcher-args", metavar="WORDS", help="more options for the launcher itself, as one word")
    jobs = parser.add_argument_group("slurm")
    for name in _SBATCH_OPTIONS:
        jobs.add_argument(f"--{name}", metavar="VALUE", help=f"sbatch's --{name}")
    jobs.add_argument("--cpu", action="store_true", default=None, help="ranks without GPUs: none are asked for")
    jobs.add_argument("--container", metavar="IMAGE", help="run the tasks in this image, by pyxis")
    jobs.add_argument("--container-mounts", metavar="SRC:DST,…", help="beside the working directory")
    jobs.add_argument(
        "--signal-seconds",
        metavar="S",
        type=_positive,
        help="checkpoint and requeue this long before --time (default: 300)",
    )
    jobs.add_argument(
        "--status", metavar="DIR", type=Path, help="how the job of this dump directory is; starts nothing"
    )
    parser.add_argument(
        "words", metavar="CONFIG …", nargs=argparse.REMAINDER, help="the run's JSON file, and options of sdp train"
    )


def check(args: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for an option that has no meaning under the launcher, and for what is missing."""
    for name, launchers in _MEANT_FOR.items():
        if getattr(args, name) is not None and args.launcher not in launchers:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} has no effect with --launcher {args.launcher}, only with {' or '.join(launchers)}; leave it out"
            )
    if args.status is not None:
        if args.words:
            raise ConfigError("--status starts nothing; leave CONFIG out")
        return
    if args.launcher in _HOSTS and args.hostfile is None:
        raise ConfigError(f"--launcher {args.launcher} needs --hostfile FILE with lines of the form: worker-0 slots=4")
    if args.launcher == "slurm" and args.gpus_per_node is None:
        raise ConfigError("--launcher slurm needs --gpus-per-node G: that many ranks start on each node")
    if not args.words:
        raise ConfigError("the following arguments are required: CONFIG; see sdp launch --help")
    if (started := detect()) is not None:
        raise LaunchError(f"{started.source} started this process already: its ranks run sdp train themselves")


def run(args: argparse.Namespace, words: Sequence[str], dump_dir: Path, degrees: Degrees) -> int:
    """Start ``sdp`` with ``words`` (``train`` and what follows it) on every rank, under a launcher that this process watches; the local
    launcher takes the place of this process.

    ``dump_dir``: where the run's files go; ``degrees``: what the number of ranks must fit.
    """
    if args.launcher == "local":
        return _local(Start(words, sys.executable, Path.cwd(), search_path()), args, degrees)
    # What this host has in PYTHONPATH already, another host has not.
    found = variables_with(("PYTHONPATH",)) | search_path()
    start = Start(words, args.python or sys.executable, Path.cwd(), found, _extra(args))
    if args.launcher == "slurm":
        return _slurm(start, args, dump_dir, degrees)
    hosts = select(read_hostfile(args.hostfile), args.include or "", args.exclude or "", args.nodes, args.gpus_per_node)
    degrees.check(world_size(hosts), f"slots of {len(hosts)} hosts")
    _warn_of_split_groups([host.name for host in hosts for _ in host.slots], degrees)
    master = (_master(args.master_addr, hosts), args.master_port or 29500)
    settings: dict[str, str] = {}
    if args.launcher == "deepspeed":
        command, settings = deepspeed_command(start, hosts, args.hostfile, master)
        if not args.dry_run and find_spec("deepspeed") is None:
            raise LaunchError(
                "--launcher deepspeed: the package deepspeed is not installed; pip install 'sdp-engine[deepspeed]'"
            )
        programs = ["pdsh", "ssh"]
    else:
        program = args.mpirun or "mpirun"
        flavour = args.mpi or flavour_of(program)
        command = mpirun_command(start, hosts, flavour, program, master)
        programs = [program]
    if args.dry_run:
        _print(command, settings, [*describe(hosts), "every rank: " + shlex.join(["sdp", *words])])
        return 0
    for name in programs:
        require(name, f"--launcher {args.launcher}")
    environ = child_environment(settings, {})
    if args.launcher == "deepspeed":  # whose own ssh sessions notice a host that is silent
        return run_watched(
            command,
            environ,
            2 * SILENT_SECONDS,
            tell_by(partial(stop_command, start, hosts, master), environ),
            kills=True,
        )
    return run_watched(command, environ, SILENT_SECONDS, tell_by_mpirun)


def _local(start: Start, args: argparse.Namespace, degrees: Degrees) -> int:
    command = train_command(start)
    if args.gpus_per_node is not None:
        degrees.check(args.gpus_per_node, "--gpus-per-node")
        command += ["--nproc", str(args.gpus_per_node)]
    else:
        degrees.processes(None, visible_devices())
    if args.dry_run:
        _print(command, start.search_path, [])
        return 0
    return _become(command, start.search_path)


def _slurm(start: Start, args: argparse.Namespace, dump_dir: Path, degrees: Degrees) -> int:
    nodes = args.nodes or 1
    degrees.check(nodes * args.gpus_per_node, "--nodes * --gpus-per-node")
    _warn_of_split_groups([f"node {rank // args.gpus_per_node}" for rank in range(nodes * args.gpus_per_node)], degrees)
    options = {name: value for name in _SBATCH_OPTIONS if (value := getattr(args, name.replace("-", "_"))) is not None}
    job = slurm.Job(
        dump_dir.name,
        nodes,
        args.gpus_per_node,
        bool(args.cpu),
        options,
        args.signal_seconds or 300,
        args.container,
        args.container_mounts,
    )
    folder = dump_dir.absolute() / slurm.FOLDER
    text = slurm.script(job, start, dump_dir.absolute())
    command = ["sbatch", "--parsable", str(folder / slurm.SCRIPT)]
    if args.dry_run:
        _print(command, {}, [])
        print(text, end="")
        return 0
    require("sbatch", "--launcher slurm")
    print(
        f"job {slurm.submit(text, dump_dir.absolute())}; its script and logs are in {folder}; sdp launch --launcher slurm --status DIR"
    )
    return 0


def _warn_of_split_groups(hosts: Sequence[str], degrees: Degrees) -> None:
    if problem := split_tensor_group(hosts, degrees.tp):
        print(f"sdp: WARNING: {problem}", file=sys.stderr, flush=True)


def _extra(args: argparse.Namespace) -> list[str]:
    """The words of ``--launcher-args``."""
    text = args.launcher_args or ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--launcher-args {text!r}: {error}") from None
    for word in words:
        if _RANKS[args.launcher].fullmatch(word):
            own = (
                "--nodes and --gpus-per-node"
                if args.launcher == "slurm"
                else "--nodes, --gpus-per-node, --include and --exclude"
            )
            raise ConfigError(f"--launcher-args {word!r}: which ranks there are is said by {own}; leave it out")
    return words


def _master(given: str | None, hosts: Sequence[Host]) -> str:
    address = check_host(given, "--master-addr") if given is not None else hosts[0].name
    if len(hosts) > 1 and (address == "localhost" or address.startswith("127.")):
        raise LaunchError(
            f"the hosts cannot reach rank 0 at {address}; name the first host otherwise, or give --master-addr"
        )
    return address


def _print(command: Sequence[str], settings: Mapping[str, str], notes: Sequence[str]) -> None:
    """The command as a shell reads it, and what it comes to as comments."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    print(" ".join([*(["env", *variables] if variables else []), shlex.join(command)]))
    for note in notes:
        print(f"# {note}")


def _become(command: Sequence[str], settings: Mapping[str, str]) -> int:
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), child_environment(settings, {}))
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
