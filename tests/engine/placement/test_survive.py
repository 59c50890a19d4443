"""``sdp.survive``: every unit has enough holders to survive the loss of so many groups, or the run
is refused.
"""

import re

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError, SDPError
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model


def layout_of(layers: int = 8, groups: int = 4, **sdp: object) -> Layout:
    model = {"name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    config = load_config({"sdp": {"groups": groups, **sdp}, "model": {**model, "num_attention_heads": 2}})
    with torch.device("meta"):
        built = build_model(config.model, vocab_size=32)
    return Layout.of(built, config, Mesh(groups))


def fewest(layout: Layout) -> int:
    return min(map(len, layout.placement.holders))


@pytest.mark.parametrize("placement", ["cyclic", "balanced", "random"])
@pytest.mark.parametrize("profile", ["depth", "uniform", "auto"])
def test_every_unit_has_enough_holders(placement: str, profile: str) -> None:
    """The profile falls to one holder by itself, so the smallest number is the option's doing."""
    for survive, capacity in ((1, 0.5), (1, 0.7), (2, 0.75), (2, 0.9)):
        layout = layout_of(placement=placement, profile=profile, capacity=capacity, survive=survive)
        assert fewest(layout) >= survive + 1
        held = sum(layout.placement.held_fraction(group) for group in range(4)) / 4
        assert held == pytest.approx(capacity, abs=0.1)
    assert fewest(layout_of(placement="cyclic", capacity=0.6)) == 1


def test_groups_of_neurons_have_enough_holders() -> None:
    neurons = {"granularity": "neuron", "neuron_groups": 4, "survive": 1}
    layout = layout_of(capacity=0.6, **neurons)
    assert len(layout.placement.holders) > 8 and fewest(layout) == 2
    with pytest.raises(ConfigError, match=r"sdp.survive: 1 needs 2 holders of every unit.*at least 0.5"):
        layout_of(capacity=0.4, **neurons)


def test_groups_of_unequal_capacity_hold_every_unit_often_enough() -> None:
    capacities = [0.9, 0.7, 0.5, 0.5]
    layout = layout_of(placement="balanced", capacity=capacities, survive=1)
    assert fewest(layout) >= 2
    for group, capacity in enumerate(capacities):
        assert layout.placement.held_fraction(group) <= capacity
    with pytest.raises(ConfigError, match=r"sdp.survive: 2 needs 3 holders of every unit"):
        layout_of(placement="balanced", capacity=capacities, survive=2)


@pytest.mark.parametrize("placement", ["cyclic", "balanced", "random"])
def test_a_capacity_that_is_too_low_is_refused_with_the_one_that_would_do(placement: str) -> None:
    with pytest.raises(ConfigError, match=r"sdp.survive: 2 needs 3 holders of every unit.*at least 0.75"):
        layout_of(placement=placement, capacity=0.6, survive=2)
    with pytest.raises(ConfigError, match=r"there are 4 groups; use at most 3"):
        layout_of(placement=placement, capacity=1.0, survive=4)


@pytest.mark.parametrize("survive", [0, 1, 2])
@pytest.mark.parametrize("groups", range(3, 13))
def test_the_capacity_that_a_refusal_names_is_enough(groups: int, survive: int) -> None:
    """Some of them, as 2/7, have no short decimal fraction."""
    with pytest.raises(ConfigError) as refused:
        layout_of(groups=groups, capacity=0.9 * (survive + 1) / groups, survive=survive)
    named = re.search(r"use a capacity of at least ([\d.]+)", str(refused.value))
    assert named is not None
    capacity = float(named[1])
    assert (survive + 1) / groups <= capacity < (survive + 1) / groups + 1e-4
    assert fewest(layout_of(groups=groups, capacity=capacity, survive=survive)) >= survive + 1


def test_named_holders_and_listed_profiles_are_checked() -> None:
    named = {f"layers.{layer}": [0, 1, 2, 3] for layer in range(7)} | {"layers.7": [2]}
    with pytest.raises(SDPError, match=r"sdp.survive: 1 needs 2 holders of every unit, and 'model.layers.7' has 1"):
        layout_of(placement=named, survive=1)
    with pytest.raises(SDPError, match=r"sdp.survive: 1 needs 2 holders"):
        layout_of(profile=[4, 3, 2, 2, 2, 2, 2, 1], survive=1)
    assert fewest(layout_of(profile=[4, 3, 3, 2, 2, 2, 2, 2], survive=1)) == 2
