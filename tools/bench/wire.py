"""The communication of a step: the number of collectives, and steps without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def collectives_of_this_process() -> int:
    """Sum the sequence numbers of all process groups: the collectives of this process."""
    return sum(group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map)  # type: ignore[attr-defined]


@contextmanager
def absent() -> Iterator[None]:
    """Make collectives of all process groups return at once, for the time of the ``with`` block.

    Nothing is sent. A gather repeats this rank's own data, and a reduction leaves it unchanged. A
    step then takes as long as its computation.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    groups, all_reduce = list(distributed_c10d._world.pg_map), dist.all_reduce
    real = [{device: group._get_backend(device) for device in group._device_types} for group in groups]
    for group in groups:
        for device in group._device_types:
            fake = FakeProcessGroup._create_internal(group.rank(), group.size())
            group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, fake)
    try:
        dist.all_reduce = _answered
        yield
    finally:
        dist.all_reduce = all_reduce
        for group, backends in zip(groups, real, strict=True):
            for device, backend in backends.items():
                kind = (
                    dist.ProcessGroup.BackendType.NCCL if device.type == "cuda" else dist.ProcessGroup.BackendType.GLOO
                )
                group._register_backend(device, kind, backend)


class _Done:
    """The result of an all-reduce that was not sent.

    Hooks of DDP read tensors from its future, which torch's fake result does not have.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def _answered(tensor: torch.Tensor, *__: Any, async_op: bool = False, **___: Any) -> Any:
    return _Done(tensor) if async_op else None
