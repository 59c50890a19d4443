"""Names and values of the section ``env``: environment variables for every rank."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from ..errors import quote

# Variables that a launcher sets for a rank, or that a process reads before its configuration.
_NOT_FOR_ENV = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_\w+|GROUP_RANK|MASTER_(ADDR|PORT)|(SDP|SLURM|OMPI|PMIX?|TORCHELASTIC)_\w+|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|LD_\w+|PYTHON\w*|MALLOC_\w+|PATH|HOME"
)


def _variable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{quote(name)} cannot be the name of an environment variable; use letters, digits and _")
    if _NOT_FOR_ENV.fullmatch(name):
        raise ValueError(
            f"{name} is the launcher's, or is read before the configuration is; set it where the processes are started"
        )
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]


VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int
