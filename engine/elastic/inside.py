"""What the ranks of one group tell each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.agreement import gather_json
from ..full_model.buffers import persistent_buffers
from ..placement.layout import Layout


def all_inside(succeeded: bool) -> bool:
    """Return whether all ranks of this group have succeeded. Collective in the group."""
    if dist.get_world_size() == 1:
        return succeeded
    flag = torch.tensor([int(succeeded)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def restorer(module: nn.Module, layout: Layout) -> Callable[[], None]:
    """Return a function that gives the persistent buffers of ``module`` the values of now again.

    An evaluation that goes on after a loss may give them worthless ones.
    """
    buffers = persistent_buffers(module, layout)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}

    def restore() -> None:
        for name, value in kept.items():
            buffers[name].copy_(value)

    return restore


def share_inside(text: str) -> str:
    """Return the text of this group's first rank. Collective in the group."""
    return gather_json(text)[0] if dist.get_world_size() > 1 else text
