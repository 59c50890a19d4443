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


def write_weights(
    state: Mapping[str, torch.Tensor], aliases: Mapping[str, str], path: Path, dtype: torch.dtype | None
) -> None:
    """Write ``state`` as safetensors, or for ``torch.load`` if the name of ``path`` asks for that.

    Args:
        state: The whole model.
        aliases: The other names of tied tensors, with the name that they have first. Safetensors
            refuses tied tensors, and models tie them again when they load.
        path: The file.
        dtype: The type of floating-point tensors; None keeps theirs.
    """
    tensors = {
        name: (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
        if name not in aliases
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save(tensors | {alias: tensors[name] for alias, name in aliases.items()}, path)
    else:
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
