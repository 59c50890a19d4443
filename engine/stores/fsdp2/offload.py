"""Where a rank's shards live: on its device, or in the host's memory (FSDP2's CPUOffloadPolicy)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ...config.schema import Config
from ..store import DeviceMessages


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
