"""The grid of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError


@given(sdp=st.integers(1, 6), fsdp=st.integers(1, 6), tp=st.integers(1, 4))
def test_coordinates(sdp: int, fsdp: int, tp: int) -> None:
    mesh = Mesh(sdp, fsdp, tp)
    assert mesh == Mesh.for_world(sdp * fsdp * tp, sdp, tp)
    assert mesh.data_ranks * tp == mesh.world_size
    assert mesh.data_ranks == mesh.data_ranks_of(range(sdp))
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
