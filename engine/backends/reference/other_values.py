"""Calls of a module with other values in place of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def cast_parameters(module: nn.Module, dtype: torch.dtype, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: p.to(dtype) if p.is_floating_point() else p for name, p in module.named_parameters()}


class Backward(nn.Module):
    """A backward pass as a module, so that ``functional_call`` can replace parameters while it
    runs.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = module

    def forward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Valued(nn.Module):
    """The module, called with ``values`` in place of its parameters of these names."""

    def __init__(self, module: nn.Module, values: Mapping[str, torch.Tensor]):
        super().__init__()
        self._hidden, self._values = (module,), dict(values)
        self.forward = module.forward  # for its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._hidden[0], self._values, args, kwargs)
