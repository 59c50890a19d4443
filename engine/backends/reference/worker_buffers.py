"""The persistent buffers (running statistics) of virtual workers that take turns with one
module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...distributed.mesh import Mesh
from ...full_model.buffers import BufferMean, persistent_buffers
from ...placement.layout import Layout


class WorkerBuffers:
    """The module's buffers during one forward pass of all workers.

    Each worker starts with the same values: the module's, or with local steps those of its group.
    Afterwards a buffer is the mean over the workers of its holders, or of its group.

    Args:
        module: the module that all workers run.
        layout: the layout.
        held: by group, the entries of the buffers that it holds (see :func:`held_entries`).
        of_groups: with local steps, the buffers of each group. They are updated in place.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        held: Sequence[Mapping[str, torch.Tensor]],
        device: torch.device,
        of_groups: Sequence[dict[str, torch.Tensor]] | None,
    ):
        self._layout, self._mesh, self._held, self._of_groups = layout, layout.mesh, held, of_groups
        self._here = persistent_buffers(module, layout)
        self._before = {name: buffer.clone() for name, buffer in self._here.items()}
        self._mean = BufferMean(layout.buffers, device)
        self._means = [BufferMean(layout.buffers, device) for _ in of_groups or ()]
        self._firsts: dict[str, torch.Tensor] = {}

    def before(self, worker: int) -> None:
        """Give the module the values with which ``worker`` starts."""
        of_groups, group = self._of_groups, self._mesh.coordinates(worker).sdp
        for name, buffer in self._here.items():
            buffer.copy_(self._before[name] if of_groups is None else of_groups[group][name])

    def after(self, worker: int) -> None:
        """Take the values with which ``worker`` ended."""
        group = self._mesh.coordinates(worker).sdp
        if self._of_groups is not None:
            everything = {name: torch.ones_like(buffer, dtype=torch.bool) for name, buffer in self._here.items()}
            self._means[group].add(self._here, everything)
            if worker == first_worker(self._mesh, group):
                self._firsts |= {f"{group} {name}": buffer.clone() for name, buffer in self._here.items()}
            return
        self._mean.add(self._here, self._held[group])
        self._firsts |= {
            name: self._here[name].clone()
            for name, info in self._layout.buffers.items()
            if worker == first_worker(self._mesh, info.holders[0])
        }

    def finish(self) -> None:
        """Set the means. Buffers that are not floating-point are those of the first worker."""
        if self._of_groups is None:
            for name, buffer in self._here.items():
                buffer.copy_(self._firsts[name])
            self._mean.give(self._here)
            return
        for group, own in enumerate(self._of_groups):
            for name, buffer in own.items():
                buffer.copy_(self._firsts[f"{group} {name}"])
            self._means[group].give(own)
        for name, buffer in self._here.items():
            buffer.copy_(self._before[name])


@contextmanager
def buffers_replaced(module: nn.Module, layout: Layout, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context in which the module's buffers have other values. Those without a value stay."""
    here = {name: buffer for name, buffer in persistent_buffers(module, layout).items() if name in values}
    before = {name: buffer.clone() for name, buffer in here.items()}
    for name, buffer in here.items():
        buffer.copy_(values[name])
    try:
        yield
    finally:
        for name, buffer in here.items():
            buffer.copy_(before[name])


def first_worker(mesh: Mesh, group: int) -> int:
    """Return the data rank of the first worker of a group.

    The reference has no tensor parallelism.
    """
    return mesh.rank(group)
