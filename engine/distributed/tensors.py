"""The local part of a tensor that may be a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or ``tensor`` itself if it is a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
