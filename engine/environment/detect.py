"""Finds this process's rank, world size and master address in the variables that a launcher set.

The table ``LAUNCHERS`` has the names of the variables for each launcher. The names come from real
starts of torchrun (torch 2.13), Open MPI 4.1, MPICH 4.0 and SLURM 22.05, and from DeepSpeed's
``launcher/cluster/launch.py``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom

from ..errors import LaunchError, quote

_RANGE = r"\d{1,18}(?:-\d{1,18})?"
_RANGES = re.compile(rf"\[(\d{{1,18}})(?:-\d{{1,18}})?(?:,{_RANGE})*\]")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,18})\))?")


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: "n01" for "n[01-03,7],login".

    Raises LaunchError if the list has another form.
    """
    first = _RANGES.sub(r"\1", nodes).partition(",")[0]
    if not re.fullmatch(r"[\w.-]+", first):
        raise LaunchError(f"node list {quote(nodes)} cannot be read; expected the form n[01-03,7],login")
    return first


def tasks_on(host: int, counts: str) -> int | None:
    """Return the number of tasks on host number ``host``, or None if the list has fewer hosts.

    ``counts`` is SLURM's list, such as "2(x3),1" for hosts with 2, 2, 2 and 1 tasks. Raises
    LaunchError if the list has another form.
    """
    for item in counts.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise LaunchError(f"task counts {quote(counts)} cannot be read; expected the form 2(x3),1")
        hosts = int(match[2] or 1)
        if host < hosts:
            return int(match[1])
        host -= hosts
    return None


PARENT_PID = "SDP_PARENT_PID"
ERROR_FILE = "SDP_ERROR_FILE"
POSITION_FILE = "SDP_PLACE_FILE"
LISTENING_SOCKET = "SDP_LISTENING_SOCKET"  # a file descriptor that rank 0 inherits

# SLURM reserves step ids from here on: 0xfffffffb for the batch script, and 0xfffffffa for an
# interactive step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The names of the variables in which one launcher gives a process its rank and world size.

    If several names are given, the first one that is set counts.
    """

    source: str
    rank: str
    world_size: Sequence[str]
    local_rank: Sequence[str]
    local_world_size: Sequence[str] = ()
    node: Sequence[str] = ()
    tasks_per_node: Sequence[str] = ()
    node_list: Sequence[str] = ()
    job: Sequence[str] = ()  # together they name the job; ranks without a MASTER_PORT derive one from them
    names_master: bool = False  # this launcher always sets MASTER_ADDR and MASTER_PORT
    is_mpi: bool = False  # its ranks can communicate through MPI
    traces: Sequence[str] = ()  # if these are set without ``rank``, the start is incomplete
    started: Callable[[Mapping[str, str]], bool] = lambda _: True


def _srun_started(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process, as one of the tasks of a step.

    A batch script has SLURM_PROCID=0, but like an ``salloc`` shell no ordinary step, so it is no
    task. The shell of ``srun --pty`` is no task either: it has SLURM_PTY_PORT, and a step with one
    task. A step with several tasks may have inherited SLURM_PTY_PORT from such a shell.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return False
    return not (environ.get("SLURM_PTY_PORT") and environ.get("SLURM_STEP_NUM_TASKS") == "1")


def _mpiexec_started(environ: Mapping[str, str]) -> bool:
    """Return whether ``mpiexec`` started this process.

    ``srun --mpi=pmi2`` sets PMI_RANK too, but no local rank. In that case only SLURM's own
    variables are complete.
    """
    has_local_rank = any(environ.get(name) for name in ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"))
    return has_local_rank or not environ.get("SLURM_PROCID")


_TORCHRUN = Launcher(
    source="torchrun",
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    node=("GROUP_RANK", "CROSS_RANK"),
    names_master=True,
    traces=("WORLD_SIZE", "LOCAL_RANK"),
)

# The first row that fits wins, so torchrun inside mpirun inside a SLURM job is torchrun. MPI comes
# before SLURM: inside a SLURM job, MPI starts one helper per host through srun, and the ranks
# inherit the SLURM variables of the helper.
LAUNCHERS = (
    replace(_TORCHRUN, source="sdp", started=lambda environ: ERROR_FILE in environ),
    replace(_TORCHRUN, source="deepspeed", started=lambda environ: "CROSS_RANK" in environ and "LOCAL_SIZE" in environ),
    _TORCHRUN,
    Launcher(
        source="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
        is_mpi=True,
        traces=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    Launcher(
        source="PMI",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("PMI_JOBID",),
        is_mpi=True,
        traces=("PMI_SIZE", "MPI_LOCALRANKID"),
        started=_mpiexec_started,
    ),
    Launcher(
        source="SLURM",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node_list=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        started=_srun_started,
    ),
)


@dataclass(frozen=True)
class Supervision:
    """What a process that the SDP launcher starts gets from the launcher.

    Attributes:
        parent_pid: the process id of the launcher.
        error_file: the file to which the process writes its fatal error, or None.
    """

    parent_pid: int
    error_file: Path | None


def supervision() -> Supervision | None:
    """Return what this process got from the SDP launcher, or None if it was started otherwise.

    Call this once: the launcher's process id is removed from the environment, because programs that
    this process starts have another parent.
    """
    parent, error_file = os.environ.pop(PARENT_PID, ""), os.environ.get(ERROR_FILE, "")
    return Supervision(int(parent), Path(error_file) if error_file else None) if parent.isdigit() else None


def position_file() -> Path | None:
    """Return the file where this rank writes its phase for the launcher, or None."""
    path = os.environ.get(POSITION_FILE, "")
    return Path(path) if path else None


def inherited_socket() -> int | None:
    """Return the file descriptor of the socket that rank 0 inherits from the launcher, or None.

    Rank 0 serves torch's store on this socket. Call this once: the variable is removed, because
    programs that the rank starts do not inherit the socket.
    """
    handle = os.environ.pop(LISTENING_SOCKET, "")
    return int(handle) if handle.isdigit() else None


def launcher_serves_store() -> bool:
    """Return whether the launcher serves torch's store, as torchrun does. If not, rank 0 must."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


LOOPBACK = "127.0.0.1"
# torch's own default. It is used on a single host if no job id is known to derive a port from.
_DEFAULT_PORT = 29500
_MOST_DIGITS = 18  # of a number in a variable


@dataclass(frozen=True)
class Environment:
    """This process's rank in a run, and the address of rank 0, from the launcher's variables.

    ``local_rank`` and ``local_world_size`` count the processes on this host. ``local_world_size``
    and ``host_index`` (the index of this host) are None if the launcher does not give them.
    ``source`` is the name of the launcher.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    host_index: int | None
    master_addr: str
    master_port: int
    source: str

    @property
    def is_alone(self) -> bool:
        """Whether a launcher other than SDP's started this process, and no other process with it.

        Such a process may start the ranks of a run itself, for example in a notebook under SLURM.
        """
        return self.world_size == 1 and self.source != "sdp"

    def variables(self) -> dict[str, str]:
        """Return rank, world sizes and master address as the variables that torchrun sets."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.host_index,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def detect(environ: Mapping[str, str] | None = None) -> Environment | None:
    """Return this process's rank in its run, or None if no launcher started the process.

    If MPI started the process without a master address, the ranks agree on an address through
    mpi4py, if it is installed. In this case, the first call is collective.

    Args:
        environ: The variables to read. By default the variables of this process.

    Raises:
        LaunchError: The variables are incomplete or contradict each other, or there are several
            hosts but no master address. The message names what is missing.
    """
    if environ is None:
        environ = os.environ
        _ask_mpi_for_the_master()
    for launcher in LAUNCHERS:
        if environ.get(launcher.rank) and launcher.started(environ):
            return _resolve(launcher, environ)
    for launcher in LAUNCHERS:
        leftovers = [name for name in launcher.traces if environ.get(name)]
        if leftovers and not environ.get(launcher.rank):
            raise LaunchError(
                f"{' and '.join(leftovers)} set but {launcher.rank} missing: no launcher sets only these variables; "
                f"unset {'it' if len(leftovers) == 1 else 'them'}, or start through torchrun, mpirun or srun"
            )
    return None


def _ask_mpi_for_the_master() -> None:
    """Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of that host.

    This happens only if MPI started this process and neither variable is set. If this function
    initialises MPI, it also finalises MPI, so that no rank waits in MPI after another rank failed.

    If mpi4py finds no MPI library, or not the launcher's MPI, nothing is set. Ranks on a single
    host do not need these variables.
    """
    launcher = next(
        (launcher for launcher in LAUNCHERS if os.environ.get(launcher.rank) and launcher.started(os.environ)), None
    )
    given = os.environ.get("MASTER_ADDR") or os.environ.get("MASTER_PORT")
    if launcher is None or not launcher.is_mpi or given or find_spec("mpi4py") is None:
        return
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # this host has no MPI library
        return
    if MPI.Is_finalized():  # MPI cannot be initialised a second time
        return
    begun = MPI.Is_initialized()  # true if the user's script uses MPI itself
    if not begun:
        MPI.Init()
    stated = _integer(os.environ, launcher.world_size)
    same = MPI.COMM_WORLD.Get_size() == stated
    if same:
        master = (socket.gethostname(), free_port()) if MPI.COMM_WORLD.Get_rank() == 0 else None
        address, port = MPI.COMM_WORLD.bcast(master)
        export({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
    if not begun:
        MPI.Finalize()


def local_environment(rank: int, world_size: int, port: int) -> Environment:
    """Return the environment of a rank in a run whose processes are all on this host."""
    return Environment(rank, world_size, rank, world_size, 0, LOOPBACK, port, "sdp")


def set_default(name: str, value: str) -> None:
    """Set an environment variable that a library reads later, unless the user has set it."""
    os.environ.setdefault(name, value)


@contextmanager
def alone_if_unlaunched() -> Iterator[None]:
    """A context in which RANK and WORLD_SIZE say that this process is the only rank.

    If a launcher started this process, the context changes nothing.
    """
    with exported({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if detect() is None else {}):
        yield


def export(settings: Mapping[str, str]) -> None:
    """Set environment variables of this process, and so of the processes that it starts later."""
    os.environ.update(settings)


@contextmanager
def exported(settings: Mapping[str, str]) -> Iterator[None]:
    """A context in which environment variables have the values ``settings``."""
    before = {name: os.environ.get(name) for name in settings}
    export(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def free_port() -> int:
    """Return a TCP port that is free on this host now. Another program may take it soon."""
    for port in SystemRandom().sample(range(20_000, 32_768), 50):  # Linux gives connections ports from 32,768 on
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise LaunchError("no TCP port from 20,000 to 32,767 is free on this host")


def _resolve(launcher: Launcher, environ: Mapping[str, str]) -> Environment:
    rank = _integer(environ, (launcher.rank,))
    world_size = _integer(environ, launcher.world_size)
    if rank is None or world_size is None:
        raise _incomplete(launcher, [_either(launcher.world_size)])
    host_index = _integer(environ, launcher.node)
    local_rank = _integer(environ, launcher.local_rank)
    local_world_size = _local_world_size(launcher, environ, host_index)
    if world_size == 1 or _is_loopback(environ.get("MASTER_ADDR", "")):
        # All ranks are on this host, so these values are known even if the launcher sets none.
        local_rank = rank if local_rank is None else local_rank
        local_world_size = world_size if local_world_size is None else local_world_size
    one_host = world_size == 1 or local_world_size == world_size
    address = _master_address(launcher, environ, world_size, one_host)
    port = _master_port(launcher, environ, world_size, one_host)
    required = {_either(launcher.local_rank): local_rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    if local_rank is None or address is None or port is None:
        raise _incomplete(launcher, [name for name, value in required.items() if value is None])
    _check_range(launcher, rank, world_size, local_rank, local_world_size)
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host_index=0 if host_index is None and one_host else host_index,
        master_addr=address,
        master_port=port,
        source=launcher.source,
    )


def _local_world_size(launcher: Launcher, environ: Mapping[str, str], host_index: int | None) -> int | None:
    counts = _first(environ, launcher.tasks_per_node)
    if counts is None or host_index is None:
        return _integer(environ, launcher.local_world_size)
    return tasks_on(host_index, counts)


def _master_address(launcher: Launcher, environ: Mapping[str, str], world_size: int, one_host: bool) -> str | None:
    """Return rank 0's host, or None if it is unknown. It is never guessed for several hosts."""
    if given := environ.get("MASTER_ADDR"):
        return given
    if world_size == 1 or (one_host and not launcher.names_master):
        return LOOPBACK
    nodes = _first(environ, launcher.node_list)
    return first_host(nodes) if nodes else None


def _master_port(launcher: Launcher, environ: Mapping[str, str], world_size: int, one_host: bool) -> int | None:
    port = _integer(environ, ("MASTER_PORT",))
    if port is not None:
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is not a port; use a number from 1 to 65535")
        return port
    if world_size == 1:
        return free_port()
    if launcher.names_master:
        return None
    job = [environ[name] for name in launcher.job if environ.get(name)]
    if job and len(job) == len(launcher.job):
        # The port is below the usual ephemeral ports (32768–60999). It differs between the jobs and
        # steps that share a host.
        return 10000 + zlib.crc32(".".join(job).encode()) % 20000
    return _DEFAULT_PORT if one_host else None


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _integer(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    if not environ[name].strip().isdecimal() or len(environ[name]) > _MOST_DIGITS:
        raise LaunchError(f"{name}={quote(environ[name])} is not a non-negative whole number")
    return int(environ[name])


def _check_range(launcher: Launcher, rank: int, world_size: int, local_rank: int, local_world_size: int | None) -> None:
    if rank >= world_size:
        raise LaunchError(f"{launcher.rank}={rank} but {_either(launcher.world_size)}={world_size}: ranks count from 0")
    if local_world_size is not None and not local_rank < local_world_size <= world_size:
        raise LaunchError(
            f"the {launcher.source} variables contradict each other: local rank {local_rank}, {local_world_size} "
            f"processes on this host, {world_size} in all; they are from two different starts, so start again"
        )


def _incomplete(launcher: Launcher, missing: Sequence[str]) -> LaunchError:
    return LaunchError(
        f"{launcher.rank} is set ({launcher.source}) but {', '.join(missing)} missing; start through torchrun, mpirun"
        " or srun, set what is missing (MASTER_ADDR is the host of rank 0), or unset all to start without a launcher;"
        " in each pod of a PyTorchJob start torchrun -m sdp train, which reads its variables"
    )


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
