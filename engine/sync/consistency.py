"""Checks that holders never drift.

It compares checksums of weights and optimizer state across the holders of each unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..distributed.agreement import find_differences
from ..distributed.tensors import local_tensor
from ..errors import HolderMismatchError, PlacementError
from ..placement.layout import Layout
from ..placement.placement import Placement
from ..placement.units import SHARED
from ..stores.store import GroupStore

CHUNK = 1 << 20


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a 63-bit checksum of the tensors' bits. It changes if any single value changes."""
    total = 0
    for tensor in tensors:
        flat = local_tensor(tensor.detach()).contiguous().view(-1)
        words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
        for start in range(0, words.numel(), CHUNK):
            chunk = words[start : start + CHUNK].long()
            positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            total = (total * 1_000_003 + int((chunk * (2 * positions + 1)).sum())) & ((1 << 63) - 1)
    return total


def check_holders(
    store: GroupStore,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
    owners: Mapping[str, torch.Tensor],
) -> None:
    """Compare every unit's weights and optimizer state bitwise across its holders. Collective.

    Args:
        store: This rank's share of its group.
        optimizer: The optimizer, whose state is compared too.
        weights: Compared in place of the store's tensors of the same keys.
        owners: The tensors to which the state of the same keys belongs, if not those of the store.

    Raises:
        HolderMismatchError: Two holders differ. It is raised on every rank and names the unit and
            the groups that disagree.
    """
    layout, context = store.layout, store.context
    names = [SHARED, *(unit.name for unit in layout.units)]
    mine = torch.zeros((2, len(names)), dtype=torch.int64, device=context.device)
    for index, unit in enumerate(names):
        held = [(key, one) for key, one in store.stepped.items() if one.unit == unit]
        whole = [(key, one) for key, one in held if not one.is_cut]  # equal on all tensor-parallel ranks
        for row, members in enumerate((held, whole)):
            mine[row, index] = checksum(
                tensor
                for key, one in members
                for tensor in (weights.get(key, one.tensor), *_state_of(optimizer, owners.get(key, one.tensor)))
            )
    everyones = mine.new_empty((layout.mesh.world_size, *mine.shape))
    dist.all_gather(list(everyones.unbind()), mine)
    for index, unit in enumerate(names):
        holders = layout.everyone if unit == SHARED else layout.placement.holders[index - 1]
        _compare(layout, unit, holders, everyones[:, 0, index].tolist(), sharded=context.is_sharded)
        _compare_copies(layout, unit, everyones[:, 1, index].tolist())


def check_placement(placement: Placement, device: torch.device) -> None:
    """Check that all ranks have computed the same placement. Collective.

    Process groups are made from the holder sets. Ranks with different holder sets would wait for
    each other forever.

    Raises:
        PlacementError: Two ranks differ. It is raised on every rank.
    """
    if any(find_differences([repr((placement.units, placement.holders))], device)):
        raise PlacementError(
            "sdp.placement: ranks have computed different placements; start all ranks with the same configuration, "
            "model and versions of sdp and NumPy, or name the holders of every unit in sdp.placement"
        )


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor) and value.dim()]


def _compare(layout: Layout, unit: str, holders: tuple[int, ...], sums: list[int], *, sharded: bool) -> None:
    mesh = layout.mesh
    for tp in range(mesh.tp):
        for group in holders:
            for fsdp in range(mesh.fsdp):
                # Without shards, a group's ranks are replicas, which must agree too.
                first = mesh.rank(holders[0], fsdp if sharded else 0, tp)
                other = mesh.rank(group, fsdp, tp)
                if sums[other] != sums[first]:
                    raise _disagreement(unit, other, group, first, holders[0])


def _compare_copies(layout: Layout, unit: str, sums: list[int]) -> None:
    """Compare the parameters that tensor parallelism does not cut.

    They must be equal on all ranks of one (sdp, fsdp) position.
    """
    for first in range(0, layout.mesh.world_size, layout.mesh.tp):
        for other in range(first + 1, first + layout.mesh.tp):
            if sums[other] != sums[first]:
                group = layout.mesh.coordinates(other).sdp
                raise _disagreement(unit, other, group, first, group)


def _disagreement(unit: str, other: int, group: int, first: int, first_group: int) -> HolderMismatchError:
    what = "the shared part" if unit == SHARED else f"unit {unit!r}"
    return HolderMismatchError(
        f"{what}: weights or optimizer state of rank {other} (group {group}) differ from those of rank {first} (group "
        f"{first_group}), and holders must stay bitwise equal; check whether the script changes weights, gradients, "
        "learning rates or optimizer state on some ranks only, or steps the optimizer itself; if it does not, check "
        "the hardware; then resume from the last checkpoint"
    )
