"""Which variables each launcher sets: one row per launcher, a predicate where the rank variable alone says too little.

Seen in real starts of torchrun (torch 2.13), Open MPI 4.1, MPICH 4.0 and SLURM 22.05, and in DeepSpeed's
``launcher/cluster/launch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

PARENT_PID = "SDP_PARENT_PID"
ERROR_FILE = "SDP_ERROR_FILE"
WHEREABOUTS_FILE = "SDP_PLACE_FILE"
LISTENING_SOCKET = "SDP_LISTENING_SOCKET"  # a file descriptor that rank 0 inherits

# Step ids from here on are SLURM's own: batch script 0xfffffffb, interactive step 0xfffffffa.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The names under which one launcher tells a process its place; alternatives stand in order of preference."""

    source: str
    rank: str
    world_size: Sequence[str]
    local_rank: Sequence[str]
    local_world_size: Sequence[str] = ()
    node: Sequence[str] = ()
    tasks_per_node: Sequence[str] = ()
    node_list: Sequence[str] = ()
    job: Sequence[str] = ()  # all of them together name the job: ranks that share no MASTER_PORT derive it from these
    names_master: bool = False  # this launcher always sets MASTER_ADDR and MASTER_PORT
    is_mpi: bool = False  # its ranks can ask each other through MPI
    traces: Sequence[str] = ()  # set without ``rank`` they are half of a start
    started: Callable[[Mapping[str, str]], bool] = lambda _: True


def _srun_started(environ: Mapping[str, str]) -> bool:
    """Is this a task of ``srun``, and not a batch script, an ``salloc`` shell or the shell of ``srun --pty``?

    The batch script has SLURM_PROCID=0 too, but no step. SLURM_PTY_PORT is inherited by every ``srun`` inside an
    interactive shell, so it tells a shell only where the step has a single task.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return False
    return not (environ.get("SLURM_PTY_PORT") and environ.get("SLURM_STEP_NUM_TASKS") == "1")


def _mpiexec_started(environ: Mapping[str, str]) -> bool:
    """``srun --mpi=pmi2`` sets PMI_RANK too, but no local rank: then SLURM's own variables are the complete ones."""
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

# The first row that fits wins, so that torchrun inside mpirun inside a SLURM job is torchrun. MPI runtimes come
# before SLURM: inside a SLURM job they start one helper per host through srun, whose SLURM variables the ranks inherit.
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
