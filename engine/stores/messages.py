"""Messages between groups: how tensors are summed and sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Messages:
    """Starts messages between groups. Results have a ``wait`` method."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place."""
        return dist.all_reduce(tensor, group=group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to send the tensor of the member ``source``."""
        return dist.broadcast(tensor, group_src=source, group=group, async_op=True)


class DeviceMessages(Messages):
    """Sends tensors from a device, because NCCL cannot send those in the host's memory."""

    def __init__(self, device: torch.device):
        self._device = device

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` must be copied to the device to be sent."""
        return tensor.device.type != self._device.type

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place."""
        return self.send(tensor, lambda sent: dist.all_reduce(sent, group=group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to send the tensor of the member ``source``."""
        return self.send(tensor, lambda sent: dist.broadcast(sent, group_src=source, group=group, async_op=True))

    def send(self, tensor: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> Any:
        """Start a message with ``start``, which gets ``tensor`` or a copy on the device."""
        sent = tensor.to(self._device, copy=True) if self.is_elsewhere(tensor) else tensor
        work = start(sent)
        return work if sent is tensor else _Staged(tensor, sent, work)


class _Staged:
    """A message that goes through a copy. ``wait`` copies the result back."""

    def __init__(self, home: torch.Tensor, sent: torch.Tensor, work: Any):
        self._home, self._sent, self._work = home, sent, work

    def wait(self) -> None:
        self._work.wait()
        self._home.copy_(self._sent)
