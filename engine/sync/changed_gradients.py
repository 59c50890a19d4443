"""Notices that a script changes gradients between ``engine.backward`` and ``engine.step``.

Gradients are equal at all holders then. A change that is equal on all ranks keeps them equal. One
that depends on what a group holds, such as ``torch.nn.utils.clip_grad_norm_``, does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..distributed.tensors import local_tensor
from ..errors import HolderMismatchError
from ..optim.clip import squared_norm
from ..placement.layout import Layout
from ..placement.units import SHARED
from ..stores.store import GroupStore

CHANGED = 2.0**1000
"""What a rank adds to the squared norm of the gradient if a script has changed some of it."""

_ROUND_OFF = 1e-6


class FinalGradients:
    """The gradients at the end of the last backward pass of a step.

    A change through ``gradient.data`` is not noticed.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the present gradients."""
        self._seen = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]

    def forget(self) -> None:
        """Forget the gradients, which frees their memory."""
        self._seen = []

    def are_changed(self) -> bool:
        """Return whether some of them are other tensors now, or were changed in place."""
        return any(p.grad is not gradient or _version(p.grad) != version for p, gradient, version in self._seen)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version + local_tensor(gradient)._version


def compare_gradients(store: GroupStore) -> None:
    """Compare the norms of every unit's gradient across the ranks that must have the same one.
    Collective.

    Raises:
        HolderMismatchError: Two ranks differ. It is raised on every rank and names the unit.
    """
    layout, mesh, device = store.layout, store.layout.mesh, store.context.device
    names, sharded = [SHARED, *(unit.name for unit in layout.units)], store.context.is_sharded
    mine = torch.zeros((2, len(names)), dtype=torch.float64, device=device)
    for index, unit in enumerate(names):
        held = [one for one in store.stepped.values() if one.unit == unit]
        whole = [one for one in held if not one.is_cut]  # equal on all tensor-parallel ranks
        for row, members in enumerate((held, whole)):
            gradients = [one.tensor.grad for one in members if one.tensor.grad is not None]
            mine[row, index] = squared_norm(gradients, device).sqrt()
    norms = mine.new_empty((mesh.world_size, *mine.shape))
    dist.all_gather(list(norms.unbind()), mine)
    for index, unit in enumerate(names):
        holders = layout.everyone if unit == SHARED else layout.placement.holders[index - 1]
        for group in holders:
            for other in mesh.ranks_of(group):
                at = mesh.coordinates(other)
                first = mesh.rank(holders[0], at.fsdp if sharded else 0, at.tp)
                peer = mesh.rank(group, at.fsdp)  # has equal copies of what tensor parallelism does not cut
                for row, one in ((0, first), (1, peer)):
                    a, b = norms[one, row, index].item(), norms[other, row, index].item()
                    if not abs(a - b) <= _ROUND_OFF * max(a, b):
                        raise _differs(layout, unit, one, other)


def _differs(layout: Layout, unit: str, first: int, other: int) -> HolderMismatchError:
    what = "the shared part" if unit == SHARED else f"unit {unit!r}"
    one, two = (f"rank {rank} (group {layout.mesh.coordinates(rank).sdp})" for rank in (first, other))
    return HolderMismatchError(
        f"the script changed gradients between engine.backward and engine.step, so that those of {what} differ between "
        f"{one} and {two}; set gradient_clipping in the configuration instead of torch.nn.utils.clip_grad_norm_, which "
        "knows the norm of one group's subnetwork only; other changes must be equal on all ranks"
    )
