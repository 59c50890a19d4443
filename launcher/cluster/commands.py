"""Builds the commands with which DeepSpeed's runner, mpirun and SLURM start the ranks of a run.

A command is a list of words, without quotes for a shell.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...engine.environment.process import child_environment, variables_with
from ...engine.errors import LaunchError, quote
from ..rank_process import PACKAGE
from .hosts import Host, include_text, world_size
from .rank import encode, is_safe

Flavour = Literal["openmpi", "mpich", "intel"]

# After this many seconds without an answer, a host counts as gone.
SILENT_SECONDS = 30
_SSH_ALIVE = f"-o ServerAliveInterval={SILENT_SECONDS // 3} -o ServerAliveCountMax=3"
# DeepSpeed's runner exports variables with these prefixes to its hosts. It puts the values between
# double quotes at best. There a shell still expands $ and `, and pdsh expands %h, %n and %u.
_DEEPSPEED_EXPORTS = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH")
_EXPANDED = re.compile(r"[\"$`\\\n]|%[hnu%]")
_ENV_LINE = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_]*\s*=.*")


@dataclass(frozen=True)
class Start:
    """The program that a launcher starts for every rank.

    Attributes:
        words: the command-line words, first ``train`` and then its arguments.
        python: the path of the interpreter, the same on every host.
        directory: the working directory, the same on every host.
        search_path: the environment variables that Python needs to find this package.
        extra: options for the launcher itself (``--launcher-args``).
    """

    words: Sequence[str]
    python: str
    directory: Path
    search_path: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()


def train_command(start: Start) -> list[str]:
    """Build the command ``sdp train`` for a launcher that sets all variables of a rank."""
    return [start.python, "-P", "-m", PACKAGE, *start.words]


def deepspeed_command(
    start: Start, hosts: Sequence[Host], hostfile: Path, master: tuple[str, int]
) -> tuple[list[str], dict[str, str]]:
    """Build the command of DeepSpeed's runner, which starts ranks through pdsh and ssh.

    The runner takes the order of the hosts from ``hostfile``, and the slots to use from
    ``--include``. ``--force_multi`` is necessary, because the runner would otherwise start the
    ranks of a single remote host on this host. ``master`` is the address and the port of rank 0.

    Returns:
        The words of the command, and the environment variables that it needs.

    Raises:
        LaunchError: a remote shell would change a path, an option or a variable.
    """
    for what, path in (("--python", start.python), ("the working directory", str(start.directory))):
        if not is_safe(path):
            raise LaunchError(
                f"{what} {quote(path)}: DeepSpeed's runner passes it unquoted to remote shells; use a path of plain "
                "characters"
            )
    for word in start.extra:
        if _EXPANDED.search(word):
            raise LaunchError(
                f"--launcher-args {quote(word)}: DeepSpeed's runner passes it through pdsh and remote shells, which "
                "would change it; leave it out"
            )
    environ = child_environment(start.search_path, {})
    for name, value in variables_with(_DEEPSPEED_EXPORTS, environ).items():
        if _EXPANDED.search(value) or not is_safe(name):
            raise LaunchError(
                f"{name}={quote(value)}: DeepSpeed's runner exports it through pdsh and remote shells, which would "
                "change the value; unset the variable, or give variables of NCCL and UCX with --env"
            )
    for folder in (Path.home(), start.directory):
        # If DS_ENV_FILE is an absolute path, ``folder /`` does not change it.
        _check_env_file(folder / environ.get("DS_ENV_FILE", ".deepspeed_env"))
    address, port = master
    runner = [start.python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    runner += [
        "--include",
        include_text(hosts),
        "--force_multi",
        "--master_addr",
        address,
        "--master_port",
        str(port),
        "--no_python",
        "--no_local_rank",
    ]
    # The user's own options come first: if an option is given twice, ssh takes the first value.
    ssh = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {_SSH_ALIVE}".strip()
    return [*runner, *start.extra, *_rank_command(start, hosts, master)], {
        **start.search_path,
        "PDSH_SSH_ARGS_APPEND": ssh,
    }


def stop_command(hosts: Sequence[Host], master: tuple[str, int], number: int) -> list[str]:
    """Build the command that sends signal ``number`` to all ranks of a run under DeepSpeed's
    runner.

    The command reaches all hosts at the same time. It replaces the runner's own reaction to Ctrl-C,
    a ``pkill`` that ends all DeepSpeed runs of the user on these hosts before they can write a
    checkpoint. ``master``, the address and the port of rank 0, identifies the run.
    """
    address = f"{master[0]}:{master[1]}".replace(".", r"\.")
    # Ranks are children of DeepSpeed's process on a host. The command of this process has rank 0's
    # address. A shell's command may have these words, too, but does not begin like this.
    pattern = rf"^[^ ]+ -u -m deepspeed\.launcher\.launch .* {address} "
    command = f"pkill -{number} -P $(pgrep -d, -f {shlex.quote(pattern)})"
    return ["pdsh", "-R", "ssh", "-f", "1024", "-w", ",".join(host.name for host in hosts), command]


def mpirun_command(
    start: Start, hosts: Sequence[Host], flavour: Flavour, program: str, master: tuple[str, int]
) -> list[str]:
    """Build the command of ``mpirun`` of Open MPI, MPICH or Intel MPI.

    Ranks communicate through torch, so the command chooses no MPI transports. Ranks fill the hosts
    in order. Ranks are not bound to cores, because MPI does not know which GPU a rank has.

    Args:
        start: the program for every rank.
        hosts: the hosts and slots of the run.
        flavour: the MPI that ``program`` belongs to.
        program: the name or path of ``mpirun``.
        master: address and port of rank 0.
    """
    rank = _rank_command(start, hosts, master)
    counted = ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)
    if flavour == "openmpi":
        command = [program, "-np", str(world_size(hosts)), "--host", counted]
        command += ["--map-by", "slot", "--rank-by", "slot", "--bind-to", "none", "--wdir", str(start.directory)]
        alive = {"time": SILENT_SECONDS // 3, "intvl": SILENT_SECONDS // 3, "probes": 3}
        settings = {"plm_rsh_args": _SSH_ALIVE} | {f"oob_tcp_keepalive_{key}": str(n) for key, n in alive.items()}
        command += [word for name, value in settings.items() for word in ("--mca", name, value)]
        command += [word for name, value in start.search_path.items() for word in ("-x", f"{name}={value}")]
        return [*command, *start.extra, *rank]
    command = [program, "-wdir", str(start.directory)]
    settings = dict(start.search_path) | ({"I_MPI_PIN": "0"} if flavour == "intel" else {})
    command += [word for name, value in settings.items() for word in ("-genv", name, value)]
    command += start.extra
    if flavour == "mpich":  # its -host applies to the whole command
        return [*command, "-hosts", counted, "-n", str(world_size(hosts)), *rank]
    for index, host in enumerate(hosts):
        command += [*([":"] if index else []), "-host", host.name, "-n", str(len(host.slots)), *rank]
    return command


def flavour_of(program: str) -> Flavour:
    """Return which MPI the ``mpirun`` at ``program`` belongs to, from the output of ``--version``.

    Raises :class:`LaunchError` if it is none of Open MPI, MPICH and Intel MPI.
    """
    require(program, "--mpirun")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    marks: dict[str, Flavour] = {
        **dict.fromkeys(("Open MPI", "OpenRTE", "PRRTE"), "openmpi"), "Intel": "intel", "HYDRA": "mpich",
    }  # fmt: skip
    for mark, flavour in marks.items():
        if mark in said:
            return flavour
    raise LaunchError(
        f"{program} --version names neither Open MPI nor MPICH nor Intel MPI; give --mpi openmpi, mpich or intel"
    )


def require(program: str, why: str) -> None:
    """Raise :class:`LaunchError` unless ``program`` is on the PATH.

    The message begins with ``why``, the option that needs the program.
    """
    if shutil.which(program) is None:
        raise LaunchError(f"{why}: {program} is not on the PATH of this host; install it, or choose another --launcher")


def _rank_command(start: Start, hosts: Sequence[Host], master: tuple[str, int]) -> list[str]:
    words = [include_text(hosts), f"{master[0]}:{master[1]}", *start.words]
    return [start.python, "-P", "-m", f"{__package__}.rank", *map(encode, words)]


def _check_env_file(path: Path) -> None:
    """Check a file of variables that DeepSpeed's runner reads.

    Raises :class:`LaunchError` if DeepSpeed cannot read a line, or if a shell would change a value.
    """
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not _ENV_LINE.fullmatch(line) or _EXPANDED.search(line):
            raise LaunchError(
                f'{path}:{number}: {quote(line)}: expected NAME=VALUE without " $ ` \\ %h; DeepSpeed allows no '
                "comments or blank lines here"
            )
