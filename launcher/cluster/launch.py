"""Starts the ranks of ``sdp train`` on this host, or through DeepSpeed's runner, mpirun or SLURM.

All launchers start the same ranks with the same arguments, so a run can change its launcher.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ...engine.distributed.mesh import split_tensor_group
from ...engine.environment.process import child_environment, variables_with
from ...engine.errors import ConfigError, LaunchError, quote
from ..degrees import Degrees, visible_devices
from ..fatal_errors import say
from ..rank_process import search_path
from ..restarts import End, await_lock, on_fewer_ranks, run_again
from ..signals import caught_signals
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
from .hosts import Host, check_host, describe, hosts_that_answer, read_hostfile, select, trim, world_size
from .watch import pass_on_by, run_watched


def _shortened(*options: str) -> str:
    """Build a pattern for the long ``options``, also if they are cut to three letters or more."""
    return rf"--({'|'.join(dict.fromkeys(name[:end] for name in options for end in range(3, len(name) + 1)))})"


_MOST_WORDS = 2**16  # characters of --launcher-args

# These options of the launchers change how many ranks there are, or on which hosts. They would
# bypass the checks. sbatch and DeepSpeed accept short options with the value attached, and long
# options that are shortened.
_RANKS = {
    "slurm": re.compile(
        r"-[Nna].*|"
        rf"{_shortened('nodes', 'ntasks', 'ntasks-per-node', 'tasks-per-node', 'array', 'gpus-per-node')}(=.*)?"
    ),
    "mpirun": re.compile(
        r"--?(n|np|N|npernode|npersocket|pernode|ppn|perhost|c|H|host|hosts|hostfile|machinefile|machine|f|default-hostfile|rf|rankfile"
        r"|rr|grr|app|configfile)(=.*)?|:"
    ),
    "deepspeed": re.compile(
        r"-[Hie].*|"
        rf"{_shortened('num_nodes', 'num_gpus', 'num_accelerators', 'hostfile')}(=.*)?|"
        rf"{_shortened('include', 'exclude', 'node_rank', 'no_ssh')}(=.*)?"
    ),
}


def launch(options: Namespace, words: Sequence[str], dump_dir: Path, degrees: Degrees) -> int:
    """Start every rank of a run under the chosen launcher.

    With DeepSpeed's runner and mpirun, this returns when the run has ended, and with SLURM when the
    job is submitted. With the local launcher it does not return, because ``sdp train`` replaces
    this process. ``--dry-run`` only prints what would be started.

    Args:
        options: the parsed arguments of ``sdp launch``, with their defaults.
        words: ``train`` and the words that follow it.
        dump_dir: where the run's files go.
        degrees: the degrees of parallelism that the number of ranks must fit.

    Returns:
        The exit code.

    Raises:
        LaunchError: the launcher, a host or this number of ranks cannot be used.
        ConfigError: batch or capacity do not fit the ranks, or ``--launcher-args`` is refused.
    """
    if options.launcher == "local":
        return _local(Start(words, sys.executable, Path.cwd(), search_path()), options, degrees)
    # PYTHONPATH is passed on, because it is not set on other hosts.
    found = variables_with(("PYTHONPATH",)) | search_path()
    start = Start(words, options.python or sys.executable, Path.cwd(), found, _extra(options))
    if options.launcher == "slurm":
        return _slurm(start, options, dump_dir, degrees)
    hosts = select(
        read_hostfile(options.hostfile), options.include, options.exclude, options.nodes, options.gpus_per_node
    )
    degrees.check(world_size(hosts), f"slots of {len(hosts)} hosts")
    _warn_of_split_groups([host.name for host in hosts for _ in host.slots], degrees)
    if options.dry_run:
        command, settings = _command(options, start, hosts)
        _print(command, settings, [*describe(hosts), "every rank: " + shlex.join(["sdp", *words])])
        return 0
    if options.launcher == "deepspeed" and find_spec("deepspeed") is None:
        raise LaunchError(
            "--launcher deepspeed: the package deepspeed is not installed; pip install 'sdp-engine[deepspeed]'"
        )
    for name in ["pdsh", "ssh"] if options.launcher == "deepspeed" else [options.mpirun]:
        require(name, f"--launcher {options.launcher}")
    return _run_on_hosts(options, start, hosts, dump_dir, degrees)


def _command(options: Namespace, start: Start, hosts: Sequence[Host]) -> tuple[list[str], dict[str, str]]:
    master = _master(options, hosts)
    if options.launcher == "deepspeed":
        return deepspeed_command(start, hosts, options.hostfile, master)
    flavour = options.mpi or flavour_of(options.mpirun)
    return mpirun_command(start, hosts, flavour, options.mpirun, master), {}


def _run_on_hosts(options: Namespace, start: Start, hosts: Sequence[Host], dump_dir: Path, degrees: Degrees) -> int:
    """Run on the hosts, and again on the remaining hosts after the loss of a rank or a host."""
    left = list(hosts)

    def run(words: Sequence[str]) -> End:
        command, settings = _command(options, replace(start, words=[*start.words, *words]), left)
        environ = child_environment(settings, {})
        if options.launcher == "mpirun":
            return run_watched(command, environ, SILENT_SECONDS, received)
        stop = pass_on_by(partial(stop_command, left, _master(options, left)), environ)
        # Twice as long, because the ssh sessions of pdsh must notice a silent host first.
        return run_watched(command, environ, 2 * SILENT_SECONDS, received, stop, ends_ranks=True)

    def prepare() -> list[str]:
        nonlocal left
        answering = hosts_that_answer(hosts)
        if gone := [host.name for host in hosts if host not in answering]:
            say(f"the run goes on without {', '.join(gone)}, which {'does' if len(gone) == 1 else 'do'} not answer")
        if options.master_addr is not None and hosts[0] not in answering:
            raise LaunchError(
                f"--master-addr {options.master_addr}: this is the address of {hosts[0].name}, which does not answer; "
                "start again on the other hosts"
            )
        ranks, words = on_fewer_ranks(degrees, world_size(hosts), world_size(answering))
        left = trim(answering, ranks)
        await_lock(dump_dir, received)
        return words

    with caught_signals() as received:
        return run_again(run, options.restarts, received, prepare)


def _local(start: Start, options: Namespace, degrees: Degrees) -> int:
    command = train_command(start)
    if options.gpus_per_node is not None:
        degrees.check(options.gpus_per_node, "--gpus-per-node")
        command += ["--nproc", str(options.gpus_per_node)]
    else:
        degrees.processes(None, visible_devices())
    if options.restarts:
        command += ["--restarts", str(options.restarts)]
    if options.dry_run:
        _print(command, start.search_path, [])
        return 0
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, child_environment(start.search_path, {}))
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None


def _slurm(start: Start, options: Namespace, dump_dir: Path, degrees: Degrees) -> int:
    nodes, per_node = options.nodes or 1, options.gpus_per_node
    degrees.check(nodes * per_node, "--nodes * --gpus-per-node")
    _warn_of_split_groups([f"node {rank // per_node}" for rank in range(nodes * per_node)], degrees)
    folder = dump_dir.absolute() / slurm.FOLDER
    text = slurm.script(options, start, dump_dir.absolute())
    command = ["sbatch", "--parsable", str(folder / slurm.SCRIPT)]
    if options.dry_run:
        _print(command, {}, [])
        print(text, end="")
        return 0
    require("sbatch", "--launcher slurm")
    print(
        f"job {slurm.submit(text, dump_dir.absolute())}; its script and logs are in {folder}; its state: sdp "
        "launch --launcher slurm --status DIR"
    )
    return 0


def _warn_of_split_groups(hosts: Sequence[str], degrees: Degrees) -> None:
    if problem := split_tensor_group(hosts, degrees.tp):
        print(f"sdp: WARNING: {problem}", file=sys.stderr, flush=True)


def _extra(options: Namespace) -> list[str]:
    text = options.launcher_args
    if len(text) > _MOST_WORDS:  # shlex takes quadratic time
        raise ConfigError(f"--launcher-args: has {len(text):,} characters; give at most {_MOST_WORDS:,}")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--launcher-args {quote(text)}: {error}") from None
    for word in words:
        if _RANKS[options.launcher].fullmatch(word):
            flags = (
                "--nodes and --gpus-per-node"
                if options.launcher == "slurm"
                else "--nodes, --gpus-per-node, --include and --exclude"
            )
            raise ConfigError(f"--launcher-args {quote(word)}: the ranks are chosen by {flags}; leave this word out")
    return words


def _master(options: Namespace, hosts: Sequence[Host]) -> tuple[str, int]:
    given = options.master_addr
    address = check_host(given, "--master-addr") if given is not None else hosts[0].name
    if len(hosts) > 1 and (address == "localhost" or address.startswith("127.")):
        raise LaunchError(
            f"the hosts cannot reach rank 0 at {address}; use another name for the first host, or give --master-addr"
        )
    return address, options.master_port or 29500


def _print(command: Sequence[str], settings: Mapping[str, str], notes: Sequence[str]) -> None:
    variables = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    print(" ".join([*(["env", *variables] if variables else []), shlex.join(command)]))
    for note in notes:
        print(f"# {note}")
