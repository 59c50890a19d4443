"""Subnetwork Data Parallelism: every group of devices trains a part of the network; only what
groups share is averaged.

This module only hands names on. They are imported when first used, so that ``sdp --help`` does not
load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.check import check as check
    from .engine.config.load import load_config as load_config
    from .engine.config.schema import Config as Config
    from .engine.distributed.join import init_distributed as init_distributed
    from .engine.distributed.mesh import Mesh as Mesh
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
    from .tools.runs.paths import load_paths as load_paths

__version__ = "0.1.0"

# The file that has the name. Without a dot at the start, it is one of engine/.
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
    "check": "check",
    "Mesh": "distributed.mesh",
    "Placement": "placement.placement",
    "add_config_arguments": "initialize",
    "init_distributed": "distributed.join",
    "Unit": "placement.units",
    "load_paths": ".tools.runs.paths",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = _HOMES[name]
        return getattr(importlib.import_module(home if home[0] == "." else f".engine.{home}", __name__), name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; DeepSpeed's own names are in the package deepspeed"
    )
