"""``sdp.checkpoint``: the helpers and constants of ``deepspeed.checkpoint`` that scripts use."""

from __future__ import annotations

from typing import Any

import torch

from . import constants
from .namespace import attributes

__path__: list[str] = []


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with copies of its tensors on ``device``, each with memory of its own.

    ``item`` is a tensor, or lists, tuples and dictionaries of tensors.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return item


_find = attributes(__name__)


def __getattr__(name: str) -> Any:
    return vars(constants)[name] if name.isupper() and name in vars(constants) else _find(name)
