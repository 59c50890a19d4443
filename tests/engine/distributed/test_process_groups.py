"""The process groups that are cut out of the grid of ranks."""

import pytest
import torch
import torch.distributed as dist
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.distributed.process_groups import Communicators
from sdp.tests.support.ranks import RankPool


def _refresh_groups() -> list[bool]:
    ways = {(0, (0, 1)), (1, (0, 1))}
    made = Communicators.build(Mesh(2), [(0, 1)], replicate_inside=True, refreshes=ways)
    groups = [*made.refresh.values(), made.holders[0, 1]]
    return [set(made.refresh) == ways, len(set(map(id, groups))) == 3]


def test_each_direction_of_new_weights_has_a_communicator_of_its_own(ranks: RankPool) -> None:
    """One communicator would send the two directions one after the other."""
    assert ranks.run(_refresh_groups, world=2) == [[True, True]] * 2


def test_groups_of_a_world_without_nccl_are_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_world(0, 4):
        made = Communicators.build(Mesh(4), {(0, 1), (0, 1, 2, 3)}, replicate_inside=True)
        assert dist.get_backend(made.holders[0, 1]) == "fake"
