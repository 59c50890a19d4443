"""``sdp.comm``: torch.distributed with the names of ``deepspeed.comm``.

The functions take DeepSpeed's options ``prof``, ``log_name`` and ``debug``, which have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup, ReduceOp

from ..distributed.join import init_distributed
from ..environment.detect import detect
from .namespace import attributes

__all__ = ["P2POp", "ProcessGroup", "ReduceOp", "init_distributed"]
__path__: list[str] = []

_OPTIONS = ("prof", "log_name", "debug")


def _without_options(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key not in _OPTIONS})

    return call


all_gather = _without_options(dist.all_gather)
all_gather_into_tensor = allgather_fn = _without_options(dist.all_gather_into_tensor)
all_reduce = _without_options(dist.all_reduce)
all_to_all = _without_options(dist.all_to_all)
all_to_all_single = _without_options(dist.all_to_all_single)
barrier = _without_options(dist.barrier)
batch_isend_irecv = _without_options(dist.batch_isend_irecv)
broadcast = _without_options(dist.broadcast)
gather = _without_options(dist.gather)
inference_all_reduce = all_reduce
irecv = _without_options(dist.irecv)
isend = _without_options(dist.isend)
monitored_barrier = _without_options(dist.monitored_barrier)
recv = _without_options(dist.recv)
reduce = _without_options(dist.reduce)
reduce_scatter = _without_options(dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _without_options(dist.reduce_scatter_tensor)
scatter = _without_options(dist.scatter)
send = _without_options(dist.send)


_BACKENDS = "DeepSpeed's communication backends are not supported; the functions of sdp.comm use torch.distributed"
_find = attributes(__name__, dict.fromkeys(("TorchBackend", "CCLBackend"), _BACKENDS))


def __getattr__(name: str) -> Any:
    """Return another function of torch.distributed, such as those that a script uses to send
    objects.
    """
    if name.startswith("_") or not hasattr(dist, name):
        return _find(name)
    found = getattr(dist, name)
    return _without_options(found) if callable(found) else found


destroy_process_group = dist.destroy_process_group
get_backend = dist.get_backend
get_global_rank = dist.get_global_rank
get_process_group_ranks = get_all_ranks_from_group = dist.get_process_group_ranks
is_available = dist.is_available
is_initialized = dist.is_initialized
new_group = dist.new_group


def get_rank(group: ProcessGroup | None = None) -> int:
    """The rank of this process in ``group``; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of processes in ``group``; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """The rank of this process on its host."""
    environment = detect()
    return environment.local_rank if environment is not None else 0


def get_world_group() -> ProcessGroup | None:
    """The group of all processes."""
    return dist.group.WORLD


def all_gather_coalesced(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], group: Any = None) -> None:
    """Gather several tensors, one after the other."""
    for output, value in zip(outputs, inputs, strict=True):
        dist.all_gather(output, value, group=group)


def all_reduce_coalesced(tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None) -> None:
    """Reduce several tensors in place, one after the other."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def configure(*_: Any, **__: Any) -> None:
    """Do nothing. The section ``comms_logger`` of the configuration counts messages."""


def log_summary(*_: Any, **__: Any) -> None:
    """Do nothing. ``engine.traffic`` has the bytes that this rank has sent."""
