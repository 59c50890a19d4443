"""The variables that each launcher sets, one row per launcher.

A row has a predicate if the rank variable alone does not identify the launcher. The names were
observed in real starts of torchrun (torch 2.13), Open MPI 4.1, MPICH 4.0 and SLURM 22.05. Those of
DeepSpeed are in its ``launcher/cluster/launch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

PARENT_PID = "SDP_PARENT_PID"
ERROR_FILE = "SDP_ERROR_FILE"
WHEREABOUTS_FILE = "SDP_PLACE_FILE"
LISTENING_SOCKET = "SDP_LISTENING_SOCKET"  # a file descriptor that rank 0 inherits

# SLURM reserves step ids from here on: 0xfffffffb for the batch script, and 0xfffffffa for an
# interactive step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The variables in which one launcher tells a process its environment.

    Alternative names are in order of preference.
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
    """Return whether this is a task of ``srun``.

    A batch script, an ``salloc`` shell and the shell of ``srun --pty`` are not. The batch script
    has SLURM_PROCID=0 too, but no step. Every ``srun`` inside an interactive shell inherits
    SLURM_PTY_PORT. So the variable indicates a shell only if the step has a single task.
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
