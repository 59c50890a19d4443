"""Names and values of the section ``env``: environment variables for every rank.

``sdp launch --env NAME=VALUE`` adds to the same section, so the same rules hold for it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field

from ..errors import quote

# The variables that the section may set, by subject. ``*`` stands for any characters. A
# configuration may come from somebody else. So a variable is listed only if no value of it chooses
# code that a rank runs, or a file that it writes. docs/clusters.md has the same table.
ALLOWED: dict[str, tuple[str, ...]] = {
    "NCCL": ("NCCL_*", "RCCL_*", "TORCH_NCCL_*"),
    "gloo": ("GLOO_*",),
    "UCX": (
        "UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_*", "UCX_RC_*", "UCX_UD_*", "UCX_DC_*", "UCX_TCP_*", "UCX_RNDV_*",
        "UCX_MAX_*", "UCX_MEMTYPE_CACHE", "UCX_LOG_LEVEL", "UCX_WARN_UNUSED_ENV_VARS",
    ),
    "libfabric": (
        "FI_PROVIDER", "FI_CXI_*", "FI_EFA_*", "FI_OFI_*", "FI_MR_*", "FI_HMEM_*", "FI_LOG_LEVEL", "FI_UNIVERSE_SIZE",
    ),
    "threads": (
        "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "KMP_AFFINITY", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM",
    ),
    "torch and CUDA": (
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "MPICH_GPU_SUPPORT_ENABLED",
    ),
}  # fmt: skip

# Of these, the ones that load a library, or name a file or a program.
REFUSED = ("*PLUGIN*", "*FILE*", "*_PATH*", "*_DIR*", "*_LIB*", "*_CONF_FILE", "*_PIPE*")


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{quote(name)} cannot be the name of an environment variable; use letters, digits and _")
    allowed = any(fnmatchcase(name, pattern) for patterns in ALLOWED.values() for pattern in patterns)
    if not allowed or any(fnmatchcase(name, pattern) for pattern in REFUSED):
        raise ValueError(
            f"{name} cannot be set here, because it is not one of the listed variables of network libraries, threads "
            "and torch (docs/clusters.md); set it where the processes are started"
        )
    return name


VariableName = Annotated[str, AfterValidator(_check_name)]


VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int
