"""The grid of ranks, the hosts that it lies on, and the process groups that are cut out of it."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import Mesh, split_tensor_group, unique_host_names
from sdp.engine.distributed.process_groups import Communicators
from sdp.engine.errors import ConfigError
from sdp.tests.support.ranks import RankPool


@given(sdp=st.integers(1, 6), fsdp=st.integers(1, 6), tp=st.integers(1, 4))
def test_coordinates(sdp: int, fsdp: int, tp: int) -> None:
    mesh = Mesh(sdp, fsdp, tp)
    assert mesh == Mesh.for_world(sdp * fsdp * tp, sdp, tp)
    assert mesh.data_ranks * tp == mesh.world_size
    assert [rank for group in range(sdp) for rank in mesh.ranks_of(group)] == list(range(mesh.world_size))
    grid = torch.arange(sdp * fsdp * tp).view(sdp, fsdp, tp)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert grid[at.sdp, at.fsdp, at.tp] == rank == mesh.rank(at.sdp, at.fsdp, at.tp)
        assert list(mesh.neighbours(at.sdp, at.fsdp)) == grid[at.sdp, at.fsdp].tolist()
        assert mesh.data_rank(rank) == at.sdp * fsdp + at.fsdp
    assert [list(ranks) for ranks in mesh.all_neighbours()] == grid.flatten(end_dim=1).tolist()


@pytest.mark.parametrize(("world", "groups", "tp"), [(6, 4, 1), (2, 4, 1), (8, 3, 2), (1, 2, 1)])
def test_worlds_that_do_not_divide(world: int, groups: int, tp: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"world size {world} is not divisible by sdp.groups {groups} .* "
        rf"start a multiple of {groups * tp} processes",
    ):
        Mesh.for_world(world, groups, tp)


@pytest.mark.parametrize(("slots", "tp"), [([2, 2], 1), ([2, 2], 2), ([4, 4], 2), ([2, 4], 2), ([8], 8), ([8, 8], 8)])
def test_groups_inside_hosts(slots: list[int], tp: int) -> None:
    assert split_tensor_group([f"n{host}" for host, count in enumerate(slots) for _ in range(count)], tp) is None


@pytest.mark.parametrize(
    ("slots", "tp", "said"),
    [
        ([2, 2], 4, "ranks 0 to 3 are on n0 and n1"),
        ([3, 3], 2, "ranks 2 to 3 are on n0 and n1"),
        ([1, 1, 1], 3, "ranks 0 to 2 are on n0 and n1 and n2"),
        ([4, 2, 2], 4, "ranks 4 to 7 are on n1 and n2"),
    ],
)
def test_a_group_on_several_hosts(slots: list[int], tp: int, said: str) -> None:
    problem = split_tensor_group([f"n{host}" for host, count in enumerate(slots) for _ in range(count)], tp)
    assert problem is not None
    assert said in problem
    assert "every layer waits for activations" in problem


def test_machines_of_one_name_are_several_hosts() -> None:
    hosts = unique_host_names([("node", "x"), ("node", "x"), ("node", "y"), ("other", "x")])
    assert hosts == ["node (1)", "node (1)", "node (2)", "other"]
    problem = split_tensor_group(hosts, 4)
    assert problem is not None
    assert "ranks 0 to 3 are on node (1) and node (2) and other" in problem
    assert unique_host_names([("a", "x"), ("b", "y")]) == ["a", "b"]


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
