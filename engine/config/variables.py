"""Names and values of the section ``env``: environment variables for every rank.

``sdp launch --env NAME=VALUE`` adds to the same section, so the same rules hold for it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field

from ..errors import quote

# Variables that the section must not set, by reason. ``*`` stands for any characters.
# docs/clusters.md has the same table. A configuration may come from somebody else, and must not
# choose the code that a rank runs. Extend the last row for every further library that loads code.
REFUSED: dict[str, tuple[str, ...]] = {
    "the launcher sets it": (
        "RANK", "WORLD_SIZE", "LOCAL_*", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "SDP_*", "SLURM_*", "OMPI_*",
        "PMI_*", "PMIX_*",
        "TORCHELASTIC_*", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    ),
    "a process reads it before the configuration": (
        "LD_*", "DYLD_*", "PYTHON*", "MALLOC_*", "GLIBC_*", "GCONV_PATH", "LOCPATH", "PATH", "HOME",
    ),
    "it chooses code that a rank or its compiler runs": (
        # shells
        "BASH*", "ENV", "SHELL*", "IFS", "CDPATH", "PS4", "PROMPT_COMMAND",
        # compilers, and directories of compiled code
        "CC", "CXX", "CPP", "AR", "LD", "NVCC*", "HIPCC*", "CUDACXX", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH",
        "ROCM_HOME", "ROCM_PATH",
        "HIP_PATH", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "*_INCLUDE_PATH", "LIBRARY_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX", "TRITON_HOME", "TRITON_*_DIR", "TRITON_*_PATH", "TORCH_EXTENSIONS_DIR",
        "TORCHINDUCTOR_*_DIR",
        # plug-ins and tools that a library loads
        "NCCL_*PLUGIN*", "NCCL_CONF_FILE", "RCCL_*PLUGIN*", "UCX_MODULE*", "UCC_*PATH", "OPAL_*", "PRTE_*",
        "FI_PROVIDER_PATH",
        "IBV_DRIVERS", "RDMAV_DRIVERS", "*_INJECTION*_PATH", "HSA_TOOLS_*", "ROCP_*", "OMP_TOOL*", "OPENSSL_*",
        "HF_MODULES_CACHE",
        "MPLBACKEND", "MATPLOTLIBRC",
        # programs that other programs start
        "GIT_*", "SSH_ASKPASS", "PDSH_*", "EDITOR", "PAGER", "BROWSER", "PERL*",
    ),
}  # fmt: skip


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{quote(name)} cannot be the name of an environment variable; use letters, digits and _")
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            raise ValueError(f"{name} cannot be set here, because {reason}; set it where the processes are started")
    return name


VariableName = Annotated[str, AfterValidator(_check_name)]


VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int
