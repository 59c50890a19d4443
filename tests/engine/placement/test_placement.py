"""Placements: coverage, capacity and connectivity as properties, and what is refused."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sdp.engine.config.schema import SDPSection
from sdp.engine.errors import ConfigError, PlacementError
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.profiles import holder_counts
from sdp.engine.placement.units import Unit


def units(*costs: int) -> list[Unit]:
    return [Unit(index, f"model.layers.{index}", (), cost) for index, cost in enumerate(costs)]


def section(**values: Any) -> SDPSection:
    return SDPSection(**values)


sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=24)


@given(
    groups=st.integers(1, 12), capacity=st.floats(0.01, 1.0), costs=sizes, profile=st.sampled_from(["uniform", "depth"])
)
def test_every_unit_is_held_and_the_mean_holds(groups: int, capacity: float, costs: list[int], profile: str) -> None:
    assume(capacity * groups >= 1)
    placement = make_placement(section(groups=groups, capacity=capacity, profile=profile), units(*costs))
    counts = [len(holders) for holders in placement.holders]
    assert all(1 <= k <= groups for k in counts)
    assert all(tuple(sorted(set(holders))) == holders and holders[-1] < groups for holders in placement.holders)
    held = sum(cost * k for cost, k in zip(costs, counts, strict=True))
    # Rounding carries over from unit to unit, so the total is off by half of one unit at most, and
    # by what is carried at the end.
    if profile == "uniform":
        assert abs(held - capacity * groups * sum(costs)) <= max(costs)
    assert sum(placement.held_fraction(group) for group in range(groups)) == pytest.approx(held / sum(costs))
    if capacity == 1.0:
        assert counts == [groups] * len(costs)


@given(groups=st.integers(2, 8), count=st.integers(2, 24), holders=st.integers(1, 8))
def test_equal_units_are_shared_evenly(groups: int, count: int, holders: int) -> None:
    assume(holders <= groups)
    placement = make_placement(
        section(groups=groups, capacity=holders / groups, profile="uniform"), units(*[7] * count)
    )
    assert all(len(held) == holders for held in placement.holders)
    loads = np.array([sum(group in held for held in placement.holders) for group in range(groups)])
    assert loads.max() - loads.min() <= holders
    if count % groups == 0:
        assert loads.max() == loads.min()


@given(groups=st.integers(2, 8), count=st.integers(2, 16), capacity=st.floats(0.1, 0.99))
def test_depth_profile_falls(groups: int, count: int, capacity: float) -> None:
    assume(capacity * groups >= 1)
    counts = holder_counts(section(groups=groups, capacity=capacity, profile="depth"), [5] * count)
    assert counts == sorted(counts, reverse=True)
    assert abs(sum(counts) - capacity * groups * count) <= 1


@given(data=st.data(), groups=st.integers(1, 6), count=st.integers(1, 8))
def test_connectivity_against_its_definition(data: st.DataObject, groups: int, count: int) -> None:
    subset = st.sets(st.integers(0, groups - 1), min_size=1).map(lambda held: tuple(sorted(held)))
    holders = tuple(data.draw(st.lists(subset, min_size=count, max_size=count)))
    placement = Placement(groups, tuple(map(str, range(count))), holders, (1,) * count)
    # Powers of the bipartite graph's adjacency say what is reached.
    matrix = np.array([[float(group in held) for held in holders] for group in range(groups)])
    reached = np.linalg.matrix_power(np.eye(groups) + matrix @ matrix.T, groups) > 0
    assert placement.connected == bool(reached.all())
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement


def test_cyclic_and_profile_by_hand() -> None:
    cyclic = make_placement(section(groups=4, capacity=0.5, profile="uniform"), units(1, 1, 1, 1))
    assert cyclic.holders == ((0, 1), (1, 2), (2, 3), (0, 3))
    assert cyclic.connected
    profile = make_placement(section(groups=4, profile=[4, 2, 1, 1]), units(1, 1, 1, 1))
    assert profile.holders == ((0, 1, 2, 3), (1, 2), (2,), (3,))
    assert profile.holder_sets == [(0, 1, 2, 3), (1, 2), (2,), (3,)]
    assert "k = 4,2,1,1 (mean 2.00)" in profile.describe()
    many = make_placement(section(groups=16, capacity=0.25, profile="uniform"), units(*[1] * 8))
    assert many.holders[:3] == ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7))
    assert {many.held_fraction(group) for group in range(16)} == {0.25}
    dealt = make_placement(section(groups=4, capacity=0.5), units(1, 1, 1, 1))
    assert dealt.holders == ((0, 1, 2, 3), (0, 1), (2,), (3,))


@given(
    groups=st.integers(1, 16),
    count=st.integers(1, 40),
    capacity=st.floats(0.01, 1.0),
    profile=st.sampled_from(["depth", "auto"]),
)
def test_where_holders_fall_with_depth_groups_of_a_cyclic_placement_have_equally_many(
    groups: int, count: int, capacity: float, profile: str
) -> None:
    assume(groups * capacity >= 1)
    placement = make_placement(section(groups=groups, capacity=capacity, profile=profile), units(*[1] * count))
    numbers = [sum(group in held for held in placement.holders) for group in range(groups)]
    assert max(numbers) - min(numbers) <= 1
    assert sum(numbers) == sum(map(len, placement.holders))


def test_protected_units() -> None:
    layers = units(10, 10, 10, 10)
    placement = make_placement(section(groups=4, capacity=0.25, protect=["layers.0", "model.layers.3"]), layers)
    assert [len(held) for held in placement.holders] == [4, 1, 1, 4]
    everything = make_placement(section(groups=4, capacity=0.25, protect=[unit.name for unit in layers]), layers)
    assert [len(held) for held in everything.holders] == [4, 4, 4, 4]
    five = units(10, 10, 10, 10, 10)
    for kind in ("cyclic", "balanced"):
        listed = {"groups": 4, "protect": ["layers.0"], "placement": kind}
        placement = make_placement(section(**listed, profile=[4, 1, 2, 3, 2], capacity=0.5), five)
        assert [len(held) for held in placement.holders] == [4, 1, 2, 3, 2]
        with pytest.raises(
            ConfigError, match=r"unit 0 \(counted from 0\), but all groups hold it .*; list 4 for this unit"
        ):
            make_placement(section(**listed, profile=[2] * 5, capacity=0.5), five)
        with pytest.raises(
            ConfigError,
            match=r"its mean is 3 holders per unit that is not protected, but .* 0.5 × 4 groups = 2; set .* 0.75",
        ):
            make_placement(section(**listed, profile=[4, 3, 3, 3, 3], capacity=0.5), five)
    with pytest.raises(
        ConfigError, match=r"sdp.protect: 'layers.9' is not a unit; units are 'model.layers.0' … 'model.layers.3'"
    ):
        make_placement(section(groups=4, protect=["layers.9"]), layers)
    with pytest.raises(PlacementError, match=r"'model.layers.0' is protected, but in sdp.placement only groups"):
        make_placement(
            section(groups=2, placement={"layers.0": [0], "layers.1": [1]}, protect=["layers.0"]), units(1, 1)
        )


@pytest.mark.parametrize("profile", ["uniform", "depth"])
def test_degenerate_units(profile: str) -> None:
    assert make_placement(section(groups=1), []).holders == ()
    without_parameters = make_placement(section(groups=2, capacity=0.5, profile=profile), units(0, 5, 0, 5))
    assert all(without_parameters.holders)
    assert make_placement(section(groups=2, capacity=1.0, profile=profile), units(0, 0)).held_fraction(0) == 0


@pytest.mark.parametrize(
    ("values", "costs", "error", "message"),
    [
        ({"capacity": 0.0}, (1, 1), ConfigError, r"sdp.capacity: 0.0 is out of range; .* more than 0 and at most 1"),
        ({"capacity": 1.5}, (1, 1), ConfigError, "sdp.capacity: 1.5 is out of range"),
        ({"capacity": 0.2}, (1, 1), ConfigError,
            r"0.2 × 4 groups = 0.8 holders per unit, .* use a capacity of at least 0.25"),
        ({"profile": [4, 2]}, (1, 1, 1), ConfigError,
            "sdp.profile: 2 values are given for 3 units; give one number of holders per unit"),
        ({"profile": [5, 2]}, (1, 1), ConfigError, "sdp.profile: 5 holders are asked for, but sdp.groups is 4"),
        ({"profile": [4, 2], "capacity": 0.25}, (1, 1), ConfigError,
            r"sdp.profile: its mean is 3 .* set sdp.capacity to 0.75 or remove it"),
        ({"placement": {"layers.0": [0]}}, (1, 1), PlacementError,
            r"no holders are given for 'model.layers.1' \(1 of 2 units\); name every unit"),
        ({"placement": {"layers.0": [0], "layers.1": []}}, (1, 1), PlacementError, "'model.layers.1' has no holder"),
        ({"placement": {"layers.0": [0, 0], "layers.1": [1]}}, (1, 1), PlacementError,
            "'model.layers.0' names a group twice"),
        ({"placement": {"layers.0": [4], "layers.1": [1]}}, (1, 1), PlacementError,
            r"has the holder 4, but sdp.groups is 4 \(groups count from 0\)"),
        ({"placement": {"layers.0": [0], "model.layers.0": [1], "layers.1": [1]}}, (1, 1), PlacementError,
            "is named twice"),
        ({"placement": {"layers.0": [0], "layers.7": [1]}}, (1, 1), PlacementError,
            "sdp.placement: 'layers.7' is not a module"),
    ],
)  # fmt: skip
def test_refused(values: dict[str, Any], costs: tuple[int, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make_placement(section(groups=4, **values), units(*costs))
    assert "\n" not in str(caught.value)


def test_warnings_say_why() -> None:
    apart = make_placement(section(groups=4, capacity=0.25), units(1, 1, 1, 1))
    (note,) = apart.warnings()
    assert note == (
        "groups [0] and groups [1] hold no unit in common, so they learn from each other only through the layers that "
        "every group holds; units that connect all groups have at least 7 holders together, and these have 4; use "
        "sdp.capacity 0.44 or more"
    )
    assert not apart.connected
    few = make_placement(section(groups=4, capacity=0.25), units(1, 1))
    assert any("groups [2, 3] hold no unit" in note for note in few.warnings())
    assert make_placement(section(groups=4, capacity=0.5), units(1, 1, 1, 1)).warnings() == []


def test_saved_placements_are_checked() -> None:
    for broken in ({}, {"groups": 2}, {"groups": 2, "units": ["a"], "holders": [[0]], "costs": ["x"]}):
        with pytest.raises(PlacementError, match="not a saved placement"):
            Placement.from_json(broken)
    with pytest.raises(PlacementError, match="has no holder"):
        Placement.from_json({"groups": 2, "units": ["a"], "holders": [[]], "costs": [1]})


def test_unit_orders_do_not_matter_for_explicit_holders() -> None:
    named = {"layers.2": [1], "layers.0": [0], "layers.1": [1, 0]}
    for order in itertools.permutations(named):
        assert make_placement(
            section(groups=2, placement={key: named[key] for key in order}), units(1, 1, 1)
        ).holders == ((0,), (0, 1), (1,))
