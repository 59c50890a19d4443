"""The process groups that are cut out of the grid of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.distributed.process_groups import Communicators
from sdp.tests.support.ranks import RankPool

HOLDER_SETS = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 3), (2,)]


def _groups(
    fsdp: int, replicate_inside: bool
) -> tuple[list[int] | None, dict[tuple[int, ...], list[int]], list[float]]:
    mesh = Mesh(4, fsdp)
    communicators = Communicators.build(mesh, HOLDER_SETS, replicate_inside=replicate_inside)
    inside = dist.get_process_group_ranks(communicators.fsdp) if communicators.fsdp is not None else None
    holders = {held: dist.get_process_group_ranks(group) for held, group in communicators.holders.items()}
    sums = []
    for _, group in sorted(communicators.holders.items()):
        value = torch.tensor(float(2 ** dist.get_rank()))
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return inside, holders, sums


@pytest.mark.parametrize("replicate_inside", [False, True])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_communicators(ranks: RankPool, fsdp: int, replicate_inside: bool) -> None:
    for rank, (inside, holders, sums) in enumerate(ranks.run(_groups, fsdp, replicate_inside, world=4 * fsdp)):
        group, shard = divmod(rank, fsdp)
        assert inside == ([group * fsdp + f for f in range(fsdp)] if fsdp > 1 and not replicate_inside else None)
        expected = {}
        for held in [*HOLDER_SETS, (0, 1, 2, 3)]:
            members = [g * fsdp + f for g in held for f in (range(fsdp) if replicate_inside else [shard])]
            if rank in members and len(members) > 1:
                expected[held] = members
        assert holders == expected
        assert sums == [float(sum(2**member for member in expected[held])) for held in sorted(expected)]


def _refresh_groups() -> list[bool]:
    ways = {(0, (0, 1)), (1, (0, 1))}
    made = Communicators.build(Mesh(2), [(0, 1)], replicate_inside=True, refreshes=ways)
    groups = [*made.refresh.values(), made.holders[0, 1]]
    return [set(made.refresh) == ways, len(set(map(id, groups))) == 3]


def test_each_direction_of_new_weights_has_a_communicator_of_its_own(ranks: RankPool) -> None:
    """What one communicator is given it does one by one: two directions would take turns, or wait
    for averages.
    """
    assert ranks.run(_refresh_groups, world=2) == [[True, True]] * 2


def test_groups_of_a_world_without_nccl_are_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_world(0, 4):
        made = Communicators.build(Mesh(4), {(0, 1), (0, 1, 2, 3)}, replicate_inside=True)
        assert dist.get_backend(made.holders[0, 1]) == "fake"
