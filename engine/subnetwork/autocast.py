"""DeepSpeed's ``torch_autocast``: the forward pass runs under ``torch.autocast``."""

from __future__ import annotations

import torch
from torch import nn

from ..config.schema import Config


def autocast_forward(model: nn.Module, config: Config, device: torch.device) -> None:
    """Run every forward pass of ``model`` under autocast, in training and in evaluation.

    A no-op unless the configuration asks for it. Parameters stay float32.
    """
    dtype = config.autocast_dtype
    if dtype is not None:
        model.forward = torch.autocast(device.type, dtype=getattr(torch, dtype))(model.forward)  # type: ignore[method-assign]
