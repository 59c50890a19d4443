"""The communication of a step: bytes, collectives, and steps without communication or overlap."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Offsets of tcpi_bytes_sent and tcpi_bytes_retrans, 8 bytes each, in Linux's struct tcp_info (since
# 4.19).
_SENT, _AGAIN, _LENGTH = 200, 208, 216
_SOCKETS = Path("/proc/self/fd")


def why_not_counted(device: torch.device) -> str | None:
    """Say why :func:`sent_by_this_process` misses the collectives on ``device``, or return None."""
    if device.type == "cuda":
        return "NCCL uses NVLink, shared memory or InfiniBand, which are not TCP connections"
    if sent_by_this_process() is None:
        return f"this {sys.platform} kernel does not tell what a TCP connection sent; Linux does since 4.19"
    return None


def sent_by_this_process() -> int | None:
    """Count the bytes that this process's open TCP connections have sent, without retransmissions.

    The count includes what gloo adds to tensors. Returns None if the kernel does not tell. A
    process always has one connection: that to the store of its process group.
    """
    if not _SOCKETS.is_dir() or not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for entry in _SOCKETS.iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        except OSError:  # the connection was closed in the meantime
            continue
        if len(info) < _LENGTH:
            return None
        total += struct.unpack_from("Q", info, _SENT)[0] - struct.unpack_from("Q", info, _AGAIN)[0]
    return total


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

    groups = list(distributed_c10d._world.pg_map)
    real = [{device: group._get_backend(device) for device in group._device_types} for group in groups]
    for group in groups:
        for device in group._device_types:
            fake = FakeProcessGroup._create_internal(group.rank(), group.size())
            group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, fake)
    try:
        with _replaced(all_reduce=_answered):
            yield
    finally:
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


def _answered(_: Callable[..., Any], tensor: torch.Tensor, *__: Any, async_op: bool = False, **___: Any) -> Any:
    return _Done(tensor) if async_op else None


@contextmanager
def awaited() -> Iterator[None]:
    """Make asynchronous reductions and broadcasts block where they start, so that nothing overlaps
    them.
    """

    def waiting(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    with _replaced(all_reduce=waiting, broadcast=waiting):
        yield


@contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of ``torch.distributed``.

    Each replacement gets the original as its first argument.
    """
    plain = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, partial(function, plain[name]))
    try:
        yield
    finally:
        for name, call in plain.items():
            setattr(dist, name, call)
