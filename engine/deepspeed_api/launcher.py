"""``sdp.launcher.runner``: names of DeepSpeed's launcher that scripts import."""

from __future__ import annotations

from pathlib import Path

from ..environment.child import deepspeed_environment_file
from .namespace import attributes

__path__: list[str] = []

DEEPSPEED_ENVIRONMENT_NAME = deepspeed_environment_file()
DEEPSPEED_ENVIRONMENT_PATHS = [str(Path.home()), "."]
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024

__getattr__ = attributes(__name__)
