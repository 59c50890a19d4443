"""Refreshes the frozen copies of weights that other groups train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.mesh import Holders
from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic, passes_on
from ..placement.buckets import Refresh


class WeightRefresh:
    """Updates this rank's frozen copies with the holders' weights.

    It also sends this rank's weights to the copies of other ranks. FSDP2 cuts the first dimension
    in the same way in all groups. So the shards align, and each shard is received in its final
    memory.

    Args:
        refreshes: all refreshes of the layout, in one order on all ranks.
        parameters: this rank's parameters, held and frozen, by canonical name.
        communicators: by source and members. One is absent if this rank is not a member.
        traffic: counts the bytes sent.
        dtype: the dtype of the frozen copies. Weights are cast to it before they are sent.
        broadcast: starts to send the tensor of the member ``source``.
    """

    def __init__(
        self,
        refreshes: Sequence[Refresh],
        parameters: Mapping[str, torch.Tensor],
        communicators: Mapping[tuple[int, Holders], dist.ProcessGroup],
        traffic: Traffic,
        dtype: torch.dtype,
        broadcast: Callable[[torch.Tensor, int, dist.ProcessGroup], Any] = lambda tensor, source, group: dist.broadcast(
            tensor, group_src=source, group=group, async_op=True
        ),
    ):
        self._broadcast = broadcast
        self._refreshes = [refresh for refresh in refreshes if (refresh.source, refresh.members) in communicators]
        self._parameters, self._communicators = parameters, communicators
        self._traffic, self._dtype = traffic, dtype
        self._pending: dict[str, list[tuple[dist.Work, torch.Tensor]]] = {}

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks that this rank sends or receives, without repetition."""
        return list(dict.fromkeys(refresh.block for refresh in self._refreshes))

    def start(self, names: Collection[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start to send and receive those parameters of ``names`` that concern this rank.

        The order is the same on all ranks. ``weights`` are sent in place of the parameters of the
        same names.
        """
        self.finish()
        for refresh in self._refreshes:
            pending = self._pending.setdefault(refresh.block, [])
            group, source = self._communicators[refresh.source, refresh.members], refresh.members.index(refresh.source)
            here, ranks = group.rank(), group.size()
            for name in (name for name in refresh.names if name in names):
                tensor = self._weight(name, weights or {})
                if tensor.numel() == 0:  # an empty shard is empty in all groups
                    continue
                if here == source:
                    tensor = tensor.to(self._dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
                if passes_on(here, source, ranks):
                    self._traffic.record("between groups", "broadcast", tensor.nbytes, ranks)
                work = self._broadcast(tensor, source, group)
                assert work is not None
                pending.append((work, tensor))  # the tensor must live until it is sent

    def _weight(self, name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        own = local_tensor(self._parameters[name].detach())
        return weights[name].detach().to(own.device) if name in weights else own

    def wait(self, block: str, stream: torch.Stream | None = None) -> None:
        """Wait for the weights of one block.

        On CUDA, the current stream waits, and also ``stream``, which gathers the weights.
        """
        for work, _ in self._pending.pop(block, ()):
            work.wait()
            if stream is not None:
                with torch.cuda.stream(stream):  # type: ignore[arg-type]
                    work.wait()

    def finish(self) -> None:
        """Wait for all refreshes that were started."""
        for block in list(self._pending):
            self.wait(block)
