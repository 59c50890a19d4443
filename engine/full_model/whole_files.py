"""Writes the whole model to files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..model_interface import get_config


def write_weights(state: Mapping[str, torch.Tensor], path: Path, dtype: torch.dtype | None) -> None:
    """Write ``state`` as safetensors. Floating-point tensors get ``dtype``, if it is given."""
    tensors = {
        name: (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


def write_configuration(module: nn.Module, directory: Path) -> None:
    """Write the files of a Hugging Face model that describe it. A no-op for other models."""
    config = get_config(module)
    if not hasattr(config, "save_pretrained"):
        return
    # FSDP2 gives the module a class of its own, which inherits from FSDPModule and the model's
    # class.
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    config = copy.deepcopy(config)
    config.architectures = [kind.__name__]
    config.save_pretrained(directory)
    if getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
