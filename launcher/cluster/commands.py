"""The command line that starts all ranks of a run, for each launcher: plain words, put together without a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...engine.environment.child import child_environment, search_program, variables_with
from ...engine.errors import LaunchError
from ..own_command import PACKAGE
from .hosts import Host, include_text, slots_text, world_size
from .quoting import encode, is_safe

Flavour = Literal["openmpi", "mpich", "intel"]

# A host that vanishes without a word is noticed after this many silent seconds.
SILENT_SECONDS = 30
_SSH_ALIVE = f"-o ServerAliveInterval={SILENT_SECONDS // 3} -o ServerAliveCountMax=3"
# What DeepSpeed's runner exports to its hosts between double quotes at best, in which a shell still expands $ and `, and pdsh %h, %n, %u.
_DEEPSPEED_EXPORTS = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH")
_EXPANDED = re.compile(r"[\"$`\\\n]|%[hnu%]")
_ENV_LINE = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_]*\s*=.*")


@dataclass(frozen=True)
class Start:
    """What is to be started: ``words`` are those of ``sdp train``, its own name first; ``extra`` go to the launcher.

    ``python`` and ``directory`` are the same paths on every host; ``search_path`` is what Python needs to find this package.
    """

    words: Sequence[str]
    python: str
    directory: Path
    search_path: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()


def train_command(start: Start) -> list[str]:
    """One rank's command, where the launcher's own variables say all about its place."""
    return [start.python, "-P", "-m", PACKAGE, *start.words]


def deepspeed_command(
    start: Start, hosts: Sequence[Host], hostfile: Path, master: tuple[str, int]
) -> tuple[list[str], dict[str, str]]:
    """DeepSpeed's runner, over pdsh and ssh, and the variables to start it with.

    It takes the hosts' order from ``hostfile`` and their slots from ``--include``; ``--force_multi``, because it would run a single
    remote host's ranks here. Raises :class:`LaunchError` where it would pass on what a remote shell reads more into.
    """
    for what, path in (("--python", start.python), ("the working directory", str(start.directory))):
        if not is_safe(path):
            raise LaunchError(
                f"{what} {path!r}: DeepSpeed's runner passes it unquoted to remote shells; use a path of plain characters"
            )
    for word in start.extra:
        if _EXPANDED.search(word):
            raise LaunchError(
                f"--launcher-args {word!r}: DeepSpeed's runner passes it through pdsh and remote shells, which would change it"
            )
    environ = child_environment(start.search_path, {})
    _check_exports(variables_with(_DEEPSPEED_EXPORTS, environ))
    for folder in (Path.home(), start.directory):
        _check_env_file(folder / environ.get("DS_ENV_FILE", ".deepspeed_env"))  # a full path stays itself
    address, port = master
    runner = [
        start.python,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(hostfile),
        "--include",
        include_text(hosts),
    ]
    runner += ["--force_multi", "--master_addr", address, "--master_port", str(port), "--no_python", "--no_local_rank"]
    # The user's own come first: of an option that is given twice ssh takes the first.
    ssh = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {_SSH_ALIVE}".strip()
    return [*runner, *start.extra, *_rank_command(start, hosts, master)], {
        **start.search_path,
        "PDSH_SSH_ARGS_APPEND": ssh,
    }


def stop_command(start: Start, hosts: Sequence[Host], master: tuple[str, int], number: int) -> list[str]:
    """What signals every rank of such a run by ``number``, on all hosts at once; with the variables of its runner."""
    words = [start.python, "-P", "-m", f"{__package__}.stop", f"{master[0]}:{master[1]}", str(number)]
    settings = [f"{name}={value}" for name, value in start.search_path.items()]
    return [
        "pdsh",
        "-R",
        "ssh",
        "-f",
        "1024",
        "-w",
        ",".join(host.name for host in hosts),
        shlex.join(["env", *settings, *words]),
    ]


def mpirun_command(
    start: Start, hosts: Sequence[Host], flavour: Flavour, program: str, master: tuple[str, int]
) -> list[str]:
    """``mpirun`` of Open MPI, MPICH or Intel: it only starts processes, so nothing is said about its transports.

    Ranks fill the hosts in order. Its own binding is off: each rank binds itself near its device.
    """
    rank = _rank_command(start, hosts, master)
    counted = ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)
    if flavour == "openmpi":
        command = [program, "-np", str(world_size(hosts)), "--host", counted]
        command += ["--map-by", "slot", "--rank-by", "slot", "--bind-to", "none", "--wdir", str(start.directory)]
        command += ["--mca", "plm_rsh_args", _SSH_ALIVE, "--mca", "oob_tcp_keepalive_time", str(SILENT_SECONDS // 3)]
        command += [
            "--mca",
            "oob_tcp_keepalive_intvl",
            str(SILENT_SECONDS // 3),
            "--mca",
            "oob_tcp_keepalive_probes",
            "3",
        ]
        command += [word for name, value in start.search_path.items() for word in ("-x", f"{name}={value}")]
        return [*command, *start.extra, *rank]
    command = [program, "-wdir", str(start.directory)]
    settings = dict(start.search_path) | ({"I_MPI_PIN": "0"} if flavour == "intel" else {})
    command += [word for name, value in settings.items() for word in ("-genv", name, value)]
    command += start.extra
    if flavour == "mpich":  # whose -host is for the whole command
        return [*command, "-hosts", counted, "-n", str(world_size(hosts)), *rank]
    for index, host in enumerate(hosts):
        command += [*([":"] if index else []), "-host", host.name, "-n", str(len(host.slots)), *rank]
    return command


def flavour_of(program: str) -> Flavour:
    """Which MPI ``program`` belongs to, by what it says of itself. Raises :class:`LaunchError` for others."""
    require(program, "--mpirun")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    marks: dict[str, Flavour] = {
        "Open MPI": "openmpi",
        "OpenRTE": "openmpi",
        "PRRTE": "openmpi",
        "Intel": "intel",
        "HYDRA": "mpich",
    }
    for mark, flavour in marks.items():
        if mark in said:
            return flavour
    raise LaunchError(
        f"{program} --version tells neither Open MPI nor MPICH nor Intel MPI; name it: --mpi openmpi | mpich | intel"
    )


def require(program: str, why: str) -> None:
    """Raise :class:`LaunchError` unless ``program`` is on the PATH."""
    if search_program(program) is None:
        raise LaunchError(f"{why}: {program} is not on the PATH of this host; install it, or choose another --launcher")


def _rank_command(start: Start, hosts: Sequence[Host], master: tuple[str, int]) -> list[str]:
    words = [slots_text(hosts), f"{master[0]}:{master[1]}", *start.words]
    return [start.python, "-P", "-m", f"{__package__}.rank", *map(encode, words)]


def _check_exports(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if _EXPANDED.search(value) or not is_safe(name):
            raise LaunchError(
                f"{name}={value!r}: DeepSpeed's runner exports it through pdsh and remote shells, which would change it;"
                " unset it, or give NCCL's and UCX's by --env"
            )


def _check_env_file(path: Path) -> None:
    """DeepSpeed reads the file; here only that it can, and that its values mean themselves in a shell."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not _ENV_LINE.fullmatch(line) or _EXPANDED.search(line):
            raise LaunchError(
                f'{path}:{number}: {line!r}: expected NAME=VALUE without " $ ` \\ %h; DeepSpeed allows no comments or blank lines here'
            )
