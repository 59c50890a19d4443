"""``sdp.git_version_info``, ``sdp.env_report`` and ``sdp.utils.torch``: this package's version and
those of what it uses.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import nccl
from torch.torch_version import TorchVersion

from .namespace import PACKAGE, attributes

__path__: list[str] = []

version: str = sys.modules[PACKAGE].__version__
version_major, version_minor, version_patch = (int(part) for part in version.split(".")[:3])
git_hash = git_branch = "unknown"
# DeepSpeed's compiled operators, of which there are none.
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, nccl.version()[:2])) if torch.version.cuda else "0.0",
    "hip_version": torch.version.hip or "0.0",
}


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version is at least ``min_version`` and at most ``max_version``."""
    own = TorchVersion(torch.__version__)
    return (min_version is None or own >= str(min_version)) and (max_version is None or own <= str(max_version))


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook`` when the gradient of ``param`` is complete. The result removes the hook."""
    return param.register_post_accumulate_grad_hook(hook)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the versions, and the device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{PACKAGE} {version}, torch {torch.__version__}, Python {platform.python_version()}, {device}")


cli_main = main
__getattr__ = attributes(__name__)
