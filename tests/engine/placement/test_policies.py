"""Random and balanced placements: properties, and a comparison with every possible placement."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sdp.engine.config.schema import SDPSection
from sdp.engine.errors import ConfigError, PlacementError
from sdp.engine.placement.packing import Packing, connect
from sdp.engine.placement.placement import COMMUNICATORS, Placement
from sdp.engine.placement.policies import make_placement, warnings_of
from sdp.engine.placement.units import find_units
from sdp.engine.sync.between import check_placement
from sdp.models.registry import build_model
from sdp.tests.support.placements import matrix_of, placed, units

GOLDEN_RANDOM = ((0, 3), (0, 1), (0, 2), (1, 2), (2, 3), (1, 3))
GOLDEN_RANDOM_FALLING = ((0, 1, 2, 3), (1, 2, 3), (0, 1), (0,), (3,), (2,))
GOLDEN_CYCLIC_FALLING = ((0, 1, 2, 3), (0, 1, 2), (0, 3), (1,), (2,), (3,))
GOLDEN_BALANCED = ((0, 1), (2, 3), (0, 2), (0, 1, 3), (0, 2), (0, 1))
capacity_lists = st.lists(st.floats(0.2, 1.0), min_size=2, max_size=8)
cost_lists = st.lists(st.integers(1, 1000), min_size=2, max_size=20)


@pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])  # each takes seconds
def test_capacities_coverage_and_determinism(examples: int) -> None:
    check = given(
        capacity=capacity_lists,
        costs=cost_lists,
        kind=st.sampled_from(["random", "balanced"]),
        profile=st.sampled_from(["uniform", "depth"]),
        with_flops=st.booleans(),
    )(_check_capacities)
    settings(max_examples=examples, deadline=None)(check)()


def _check_capacities(capacity: list[float], costs: list[int], kind: Any, profile: Any, with_flops: bool) -> None:
    assume(sum(capacity) >= 1)
    these = units(costs, costs[::-1] if with_flops else None)
    values = {"groups": len(capacity), "capacity": capacity, "placement": kind, "profile": profile, "seed": 1}
    try:
        placement = placed(these, **values)
    except PlacementError as error:
        assert "\n" not in str(error)
        assert "the groups have no room for" in str(error)
        suggested = str(error).split("; use ")[1].split(", or cut")[0]
        larger = [float(part) for part in suggested.strip("[]").split(", ")]
        placed(these, **{**values, "capacity": larger * (len(capacity) // len(larger))})
        return
    for group, limit in enumerate(capacity):
        assert placement.held_fraction(group) <= limit + 1e-8
    assert all(placement.holders)
    assert placed(these, **values) == placement


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(2, 8),
    count=st.integers(2, 24),
    held=st.integers(1, 24),
    kind=st.sampled_from(["random", "balanced"]),
)
def test_equal_units_are_connected_and_fill_every_group(groups: int, count: int, held: int, kind: Any) -> None:
    assume(held <= count <= held * groups)
    placement = placed(units([7] * count), groups=groups, capacity=held / count, placement=kind, profile="uniform")
    if held > COMMUNICATORS and groups > 5:  # units are bundled, and bundles may not fill every group
        assert matrix_of(placement).sum(axis=1).max() <= held
        assert placement.guarantees()["communicators_per_rank"] <= COMMUNICATORS + 1
        return
    assert set(matrix_of(placement).sum(axis=1)) == {held}
    counts = [len(holders) for holders in placement.holders]
    assert max(counts) - min(counts) <= 1
    assert placement.connected == placement.can_be_connected
    assert placement.imbalance == 1.0


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 6),
    profile=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    kind=st.sampled_from(["cyclic", "random", "balanced"]),
)
def test_listed_holders_are_kept_and_connected_where_they_can_be(groups: int, profile: list[int], kind: Any) -> None:
    assume(max(profile) <= groups)
    placement = placed(units([5] * len(profile)), groups=groups, profile=profile, placement=kind)
    assert [len(holders) for holders in placement.holders] == profile
    assert placement.can_be_connected == (sum(profile) >= groups + len(profile) - 1)
    assert placement.connected == placement.can_be_connected


@settings(max_examples=40, deadline=None)
@given(data=st.data(), groups=st.integers(2, 7), count=st.integers(1, 9))
def test_connecting_keeps_holders(data: st.DataObject, groups: int, count: int) -> None:
    held = np.array(
        data.draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=groups, max_size=groups))
    )
    assume(held.any(axis=0).all())
    ones = np.ones(count, dtype=np.int64)
    packing = Packing(np.full(groups, count, dtype=np.int64), ones, ones, held.sum(axis=0))
    joined = connect(packing, held)
    assert (joined.sum(axis=0) == held.sum(axis=0)).all()
    names = tuple(map(str, range(count)))
    placement = Placement(
        groups, names, tuple(tuple(np.flatnonzero(column).tolist()) for column in joined.T), (1,) * count
    )
    assert placement.connected == placement.can_be_connected


def _waiting(placement: Placement) -> int:
    """Work that holders of a unit wait for each other in backward, over all units."""
    last = len(placement.units) - 1
    waiting = 0
    for unit, holders in enumerate(placement.holders):
        done = [sum(placement.work[u] for u in range(unit, last + 1) if placement.holds(group, u)) for group in holders]
        waiting += sum(max(done) - at for at in done)
    return waiting


def test_holders_of_equal_units_come_to_them_together() -> None:
    """Last units of all groups come first, then the ones before."""
    huge = 10**17  # FLOPs: those of all units and groups do not fit 64 bits
    placement = placed(units([7] * 8, [huge] * 8), groups=4, capacity=0.5, placement="balanced", profile="uniform")
    for late in (7, 5, 3, 1):
        assert sorted(placement.holders[late] + placement.holders[late - 1]) == [0, 1, 2, 3]
    assert _waiting(placement) == 0


def test_random_follows_the_seed() -> None:
    layers = units([7] * 16)
    drawn = [placed(layers, groups=8, capacity=0.25, placement="random", seed=seed) for seed in range(8)]
    assert len(set(drawn)) == 8


@pytest.mark.parametrize("capacity", [0.25, 0.5])
def test_every_two_groups_of_a_balanced_placement_share_about_as_many_units(capacity: float) -> None:
    matrix = matrix_of(placed(units([7] * 24), groups=4, capacity=capacity, placement="balanced", profile="uniform"))
    shared = (matrix @ matrix.T)[np.triu_indices(4, 1)]
    assert shared.max() - shared.min() <= 1 + (capacity == 0.25)


def test_placements_that_must_never_change() -> None:
    """A rank on another machine, with another Python, must come to the same."""
    uniform: dict[str, Any] = {"groups": 4, "profile": "uniform"}
    assert placed(units([7] * 6), **uniform, capacity=0.5, placement="random", seed=5).holders == GOLDEN_RANDOM
    assert (
        placed(units([7] * 6), **uniform, capacity=[0.84, 0.5, 0.5, 0.34], placement="balanced").holders
        == GOLDEN_BALANCED
    )
    assert placed(units([7] * 6), groups=4, capacity=0.5, placement="random", seed=5).holders == GOLDEN_RANDOM_FALLING
    assert placed(units([7] * 6), groups=4, capacity=0.5).holders == GOLDEN_CYCLIC_FALLING


def test_capacity_per_group() -> None:
    placement = placed(units([7] * 8), groups=4, capacity=[0.75, 0.75, 0.5, 0.5], placement="balanced")
    assert [placement.held_fraction(group) for group in range(4)] == [0.75, 0.75, 0.5, 0.5]
    assert placement.imbalance == pytest.approx(1.2)
    equal = placed(units([7] * 8), groups=4, capacity=[0.5] * 4)
    assert equal == placed(units([7] * 8), groups=4, capacity=0.5)


def test_protected_units_are_beside_the_capacity() -> None:
    placement = placed(units([50, 7, 7, 7, 7]), groups=2, capacity=0.5, placement="balanced", protect=["layers.0"])
    assert placement.holders[0] == (0, 1)
    assert matrix_of(placement).sum(axis=1).tolist() == [3, 3]
    assert placement.loads.max() == 64
    assert placed(units([3]), groups=2, placement="balanced", protect=["layers.0"]).holders == ((0, 1),)


def test_profile_auto_is_the_best_rule_known() -> None:
    for kind in ("cyclic", "random", "balanced"):
        values: dict[str, Any] = {"groups": 4, "capacity": 0.5, "placement": kind}
        assert placed(units([7] * 8), **values, profile="auto") == placed(units([7] * 8), **values, profile="depth")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"capacity": [0.5, 0.5]}, ConfigError,
            "sdp.capacity: 2 values are given for 4 groups; give one number, or one per group"),
        ({"capacity": [0.5, 0.5, 0.5, 0.0]}, ConfigError, "sdp.capacity: 0.0 is out of range"),
        ({"capacity": [0.2] * 4}, ConfigError,
            "sdp.capacity: the values add up to 0.8 holders per unit, .* add up to at least 1"),
        ({"capacity": [0.5, 1.0, 1.0, 1.0], "placement": "cyclic"}, ConfigError,
            'needs the same capacity for all groups; .* sdp.placement "balanced"'),
        ({"capacity": 0.3}, PlacementError,
            r"'layers.0' has 76.9% of the units' parameters, and .* have no room for it; use 0.78\d, or"),
        ({"placement": {"layers.0": [0, 1], "layers.1": [1, 0], "layers.2": [2, 3], "layers.3": [3, 2]}},
            PlacementError,
            r"sdp.placement: groups \[0, 1\] and groups \[2, 3\] have no unit in common, although there are "
            r"enough holders to connect all groups \(8, and 7 suffice\); give a unit holders in both sets"),
        ({"capacity": 0.6, "profile": [4, 2, 1, 1, 4], "placement": "random"}, PlacementError,
            "'layers.0' has .* have no room for it in 4 groups"),
    ],
)  # fmt: skip
def test_refused(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        placed(
            units([10, 1, 1, 1] if "profile" not in values else [10, 1, 1, 1, 1]),
            **{"groups": 4, "placement": "balanced", **values},
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "profile", "groups"),
    [
        ("cyclic", "depth", 1024),
        ("random", "depth", 1024),
        ("balanced", "depth", 256),
        ("cyclic", "uniform", 1024),
        pytest.param("balanced", "depth", 1024, marks=pytest.mark.slow),
        pytest.param("balanced", "uniform", 1024, marks=pytest.mark.slow),
    ],
)
def test_many_groups(kind: Any, profile: Any, groups: int) -> None:
    costs = [1000 + index % 7 for index in range(10_000 * groups // 1024)]
    capacity = 20.48 / groups
    placement = placed(units(costs), groups=groups, capacity=capacity, placement=kind, profile=profile)
    guarantees = placement.guarantees()
    assert len(placement.describe()) < 600
    assert guarantees["connected_through_units"]
    assert guarantees["fewest_holders"] >= (19 if profile == "uniform" else 1)
    assert 0.95 * 20.48 < sum(map(len, placement.holders)) / len(costs) < 1.01 * 20.48
    assert guarantees["slowest_over_mean"] < 1.05
    if kind != "cyclic":
        assert guarantees["communicators_per_rank"] <= 1.25 * COMMUNICATORS


@pytest.mark.parametrize(
    ("costs", "groups", "capacity", "holders"),
    [
        ([1] * 8, 4, 0.25, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        ([1] * 4, 4, 0.5, [[0, 3], [0, 1], [1, 2], [2, 3]]),
        ([6, 1, 1, 1, 1, 6], 2, 0.5, [[0], [0], [0], [1], [1], [1]]),
        ([1] * 10, 2, 0.3, [[0]] * 3),
        ([5, 1, 1, 1, 4], 2, 0.5, [[0], [0], [1], [1], [1]]),
        ([3, 3, 3], 2, 0.5, [[0], [0, 1], [1]]),
    ],
)
def test_contiguous_runs(costs: Any, groups: int, capacity: Any, holders: Any) -> None:
    values = {"groups": groups, "capacity": capacity, "placement": "contiguous"}
    if len(holders) < len(costs):
        with pytest.raises(ConfigError, match="every unit needs at least one"):
            placed(units(costs), **values)
        return
    assert [list(held) for held in placed(units(costs), **values).holders] == holders


def test_contiguous_is_uniform() -> None:
    assert SDPSection(placement="contiguous").profile == "uniform"
    with pytest.raises(ConfigError, match=r'sdp\.profile: "depth" contradicts sdp\.placement "contiguous"'):
        placed(units([1, 1]), groups=2, placement="contiguous", profile="depth")
    with pytest.raises(
        ConfigError, match=r"sdp\.capacity: a contiguous placement needs the same capacity for all groups"
    ):
        placed(units([1, 1]), groups=2, placement="contiguous", capacity=[0.6, 0.5])


def _differing_placements() -> str:
    import torch
    import torch.distributed as dist

    same = Placement(2, ("u",), ((0, 1),), (3,))
    check_placement(same, torch.device("cpu"))
    try:
        check_placement(Placement(2, ("u",), ((dist.get_rank(),),), (3,)), torch.device("cpu"))
    except PlacementError as error:
        return str(error)
    return ""


def test_ranks_with_other_placements_stop(ranks: Any) -> None:
    for message in ranks.run(_differing_placements, world=2):
        assert "ranks have computed different placements" in message


RESNET = {"name": "resnet18", "stem": "cifar", "num_classes": 10, "image_size": 32}


def test_resnet_blocks_that_cannot_be_balanced() -> None:
    these = find_units(build_model(RESNET), "auto")
    with pytest.raises(
        PlacementError, match=r"'layer4.1' has 74.4% .* no room for it; use 0.755, or.*\"neuron\".*sdp.protect"
    ):
        placed(these, groups=4, capacity=0.5, placement="balanced")
    section = SDPSection(groups=4, capacity=0.5, profile="uniform")
    (note,) = warnings_of(section, make_placement(section, these))
    assert note.startswith("a group holds 6% to 94% of the units' parameters, and the slowest has 1.20 × the mean work")
    assert warnings_of(section, make_placement(section, units([7] * 5))) == []
