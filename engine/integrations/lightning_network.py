"""The modules of a LightningModule, as the model that an engine cuts and trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from ..model_interface import HOOKS


class Network(nn.Module):
    """The modules of a LightningModule, under the same names, without the rest of it.

    It shares the module's dictionaries of children, parameters and buffers, so what the engine cuts
    is cut there, too. Its ``forward`` calls a step of the LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.__dict__ |= {name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")}
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name in HOOKS:
            if hasattr(module, name):
                self.__dict__[name] = _hook(module, name)

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step``. Its arguments pass through here, so that they get the type of the model."""
        return step(*args, **kwargs)


def _hook(module: LightningModule, name: str) -> Callable[..., Any]:
    return lambda *args: getattr(module, name)(*args)  # a copy of the network does not copy the module


def has_tensors(module: nn.Module) -> bool:
    """Whether ``module`` has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
