"""Subnetwork Data Parallelism: every group of devices trains a part of the network; only what
groups share is averaged.

This module only hands names on. They are imported when first used, so that ``sdp --help`` does not
load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .engine.deepspeed_api import namespace as _deepspeed

if TYPE_CHECKING:
    from .engine.config.load import load_config as load_config
    from .engine.config.schema import Config as Config
    from .engine.distributed.join import init_distributed as init_distributed
    from .engine.distributed.mesh import Mesh as Mesh
    from .engine.engine import SDPEngine as DeepSpeedEngine
    from .engine.engine import SDPEngine as SDPEngine
    from .engine.errors import ConfigError as ConfigError
    from .engine.errors import DivergenceError as DivergenceError
    from .engine.errors import HolderMismatchError as HolderMismatchError
    from .engine.errors import ModelError as ModelError
    from .engine.errors import NonFiniteError as NonFiniteError
    from .engine.errors import PlacementError as PlacementError
    from .engine.errors import SDPError as SDPError
    from .engine.initialize import add_config_arguments as add_config_arguments
    from .engine.initialize import initialize as initialize
    from .engine.model_interface import Branch as Branch
    from .engine.placement.placement import Placement as Placement
    from .engine.placement.units import Unit as Unit

__version__ = "0.1.0"

# The file of engine/ that has the name.
_HOMES = {
    "Branch": "model_interface",
    "Config": "config",
    "load_config": "config",
    "SDPEngine": "engine",
    "ConfigError": "errors",
    "DivergenceError": "errors",
    "HolderMismatchError": "errors",
    "ModelError": "errors",
    "NonFiniteError": "errors",
    "PlacementError": "errors",
    "SDPError": "errors",
    "initialize": "initialize",
    "Mesh": "distributed.mesh",
    "Placement": "placement.placement",
    "add_config_arguments": "initialize",
    "init_distributed": "distributed.join",
    "Unit": "placement.units",
}
# Names of DeepSpeed: the file of engine/, and the name there.
_DEEPSPEED_NAMES = {
    "DeepSpeedConfig": ("deepspeed_api.constants", "DeepSpeedConfig"),
    "DeepSpeedConfigError": ("errors", "ConfigError"),
    "DeepSpeedEngine": ("engine", "SDPEngine"),
    "OnDevice": ("deepspeed_api.utils", "OnDevice"),
    "get_accelerator": ("deepspeed_api.accelerator", "get_accelerator"),
    "log_dist": ("deepspeed_api.utils", "log_dist"),
    "logger": ("deepspeed_api.utils", "logger"),
    "version": ("deepspeed_api.versions", "version"),
    "__git_hash__": ("deepspeed_api.versions", "git_hash"),
    "__version_major__": ("deepspeed_api.versions", "version_major"),
    "__version_minor__": ("deepspeed_api.versions", "version_minor"),
    "__version_patch__": ("deepspeed_api.versions", "version_patch"),
    "__git_branch__": ("deepspeed_api.versions", "git_branch"),
    "ADAM_OPTIMIZER": ("deepspeed_api.constants", "ADAM_OPTIMIZER"),
    "LAMB_OPTIMIZER": ("deepspeed_api.constants", "LAMB_OPTIMIZER"),
    "MUON_OPTIMIZER": ("deepspeed_api.constants", "MUON_OPTIMIZER"),
    "TORCH_DISTRIBUTED_DEFAULT_PORT": ("deepspeed_api.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
}
__all__ = ["DeepSpeedEngine", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]
_deepspeed.install(__name__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".engine.{_HOMES[name]}", __name__), name)
    if name in _DEEPSPEED_NAMES:
        file, original = _DEEPSPEED_NAMES[name]
        return getattr(importlib.import_module(f".engine.{file}", __name__), original)
    if name in _deepspeed.MODULES or name in _deepspeed.OUT_OF_SCOPE:
        return importlib.import_module(f".{name}", __name__)
    if name in _deepspeed.NAMES_OUT_OF_SCOPE:
        return _deepspeed.refusing(name, _deepspeed.NAMES_OUT_OF_SCOPE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
