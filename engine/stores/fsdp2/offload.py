"""Where a rank's shards live: on its device, or in the host's memory (FSDP2's CPUOffloadPolicy)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ...config.schema import Config


class ShardHome:
    """The memory of this rank's sharded parameters, gradients and optimizer state.

    With ``offload_optimizer`` or ``offload_param`` this is the host's memory. FSDP2 copies a
    parameter to the device before it gathers it, and a reduced gradient to the host. The optimizer
    steps on the host.

    Attributes:
        device: the device of the shards.
        offloads: whether it is the host instead of the rank's own device.
        messages: sends shards to other groups.
    """

    def __init__(self, config: Config, device: torch.device, *, sends: bool):
        """``sends``: whether gradients are averaged with other ranks after FSDP2 reduced them."""
        zero = config.zero_optimization
        self.offloads = zero.offloads
        self.device = torch.device("cpu") if self.offloads else device
        self.messages = DeviceMessages(device)
        self._own = device
        # FSDP2 copies to pinned memory while backward goes on. Tensors must be on the device to be
        # averaged.
        self._pins = device.type == "cuda" and not sends and zero.pins_memory

    def policy(self) -> OffloadPolicy:
        """Return the policy for ``fully_shard``."""
        return CPUOffloadPolicy(pin_memory=self._pins) if self.offloads else OffloadPolicy()

    def keep_buffers_on_device(self, model: nn.Module) -> None:
        """Move the buffers of ``model`` to the rank's own device, where forward reads them."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._own))


class DeviceMessages:
    """Sends tensors from a device, because NCCL cannot send those in the host's memory.

    Results have a ``wait`` method, like those of torch.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` must be copied to the device to be sent."""
        return tensor.device.type != self._device.type

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Start to sum ``tensor`` in place."""
        sent = tensor.to(self._device, copy=True) if self.is_elsewhere(tensor) else tensor
        work = dist.all_reduce(sent, group=group, async_op=True)
        return work if sent is tensor else _Staged(tensor, sent, work)

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        """Start to send the tensor of the member ``source``."""
        sent = tensor.to(self._device, copy=True) if self.is_elsewhere(tensor) else tensor
        work = dist.broadcast(sent, group_src=source, group=group, async_op=True)
        return work if sent is tensor else _Staged(tensor, sent, work)


class _Staged:
    """A message that goes through a copy. ``wait`` copies the result back."""

    def __init__(self, home: torch.Tensor, sent: torch.Tensor, work: Any):
        self._home, self._sent, self._work = home, sent, work

    def wait(self) -> None:
        self._work.wait()
        self._home.copy_(self._sent)
