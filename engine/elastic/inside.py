"""What the ranks of one group tell each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..distributed.agreement import gather_json


def all_inside(succeeded: bool) -> bool:
    """Return whether all ranks of this group have succeeded. Collective in the group."""
    if dist.get_world_size() == 1:
        return succeeded
    flag = torch.tensor([int(succeeded)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def share_inside(text: str) -> str:
    """Return the text of this group's first rank. Collective in the group."""
    return gather_json(text)[0] if dist.get_world_size() > 1 else text
