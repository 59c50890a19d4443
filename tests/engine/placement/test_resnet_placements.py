"""Placements of ResNet-18's blocks: balanced within their memory, in the paper's costs."""

from __future__ import annotations

import pytest
from sdp.engine.config.schema import SDPSection
from sdp.engine.errors import PlacementError
from sdp.engine.placement.policies import make_placement, warnings_of
from sdp.engine.placement.units import find_units
from sdp.models.registry import build_model
from sdp.tests.support.placements import placed, units

# The eight basic blocks of ResNet-18 for 32 × 32 images (He et al., arXiv 1512.03385; stem of
# stride 1, as usual on CIFAR): convolutions of 3 × 3 without biases, 2 batch norms, and in the
# first block of stages 2 to 4 a 1 × 1 convolution with a batch norm.
STAGES = [
    (64, 64, 32),
    (64, 64, 32),
    (64, 128, 16),
    (128, 128, 16),
    (128, 256, 8),
    (256, 256, 8),
    (256, 512, 4),
    (512, 512, 4),
]


RESNET_PARAMETERS = [9 * i * o + 9 * o * o + 4 * o + (i * o + 2 * o) * (i != o) for i, o, _ in STAGES]


RESNET_FLOPS = [2 * side**2 * (9 * i * o + 9 * o * o + i * o * (i != o)) for i, o, side in STAGES]


def test_resnet_costs_are_those_of_the_paper() -> None:
    assert sum(RESNET_PARAMETERS) + 3 * 9 * 64 + 2 * 64 + 512 * 1000 + 1000 == 11_689_512 - 3 * 64 * (
        49 - 9
    )  # torchvision's resnet18
    assert RESNET_FLOPS[0] == 2 * 2 * 9 * 64 * 64 * 32 * 32


def test_resnet_blocks_are_balanced_within_their_memory() -> None:
    these = units(RESNET_PARAMETERS, RESNET_FLOPS)
    placement = placed(these, groups=4, capacity=0.5, placement="balanced", profile="uniform")
    assert placement.imbalance <= 1.05
    assert all(placement.held_fraction(group) <= 0.5 for group in range(4))
    assert [len(holders) for holders in placement.holders].count(2) >= 7
    assert placement.connected
    # Where holders fall with depth, eight blocks do not allow it: 1.067 is the least.
    falling = placed(these, groups=4, capacity=0.5, placement="balanced", profile="depth")
    assert 1.067 <= falling.imbalance < 1.09
    assert all(falling.held_fraction(group) <= 0.5 for group in range(4))
    # What it is for: the same number of blocks for all does not fit, by far.
    cyclic = placed(these, groups=4, capacity=0.5, profile="uniform")
    assert max(cyclic.held_fraction(group) for group in range(4)) > 0.75


RESNET = {"name": "resnet18", "stem": "cifar", "num_classes": 10, "image_size": 32}


def test_resnet_blocks_that_cannot_be_balanced() -> None:
    these = find_units(build_model(RESNET), "auto")
    with pytest.raises(
        PlacementError, match=r"no room to hold 'layer4.1' at all .*74.4%.* 0.755 would do.*\"neuron\".*sdp.protect"
    ):
        placed(these, groups=4, capacity=0.5, placement="balanced")
    section = SDPSection(groups=4, capacity=0.5, profile="uniform")
    (note,) = warnings_of(section, make_placement(section, these))
    assert note.startswith(
        "units differ in size: a group holds 6% to 94% of their parameters, and the slowest has 1.20 × the mean work"
    )
    assert warnings_of(section, make_placement(section, units([7] * 5))) == []
