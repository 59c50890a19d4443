"""``sdp advise``: SDP is planned in the layout of the file, or with one sharded group per node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.tests.tools.advise.made_up import CONFIG
from sdp.tools.advise.candidates import candidates, candidates_in_the_better_layout, one_group_per_node
from sdp.tools.cli import main
from sdp.tools.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("traced_once")

FOUR = CONFIG | {"sdp": CONFIG["sdp"] | {"groups": 4}}
PER_NODE = "one sharded group per node (--set sdp.groups=2 zero_optimization.stage=3)"


def test_sdp_has_the_layout_in_which_it_is_faster() -> None:
    config, reported = load_config(FOUR), list[str]()
    for between, groups in ((1e6, 2), (1e15, 4)):
        machine = Machine((2, 2), 1e12, 1.0, 1e12, between)
        other, found, notes = candidates_in_the_better_layout(config, machine, 4, None, reported.append)
        assert other.sdp.groups == groups and {one.groups for one in found if one.is_sdp} == {groups}
        layout = f"sdp.groups {groups}, zero_optimization.stage {3 if groups == 2 else 0}"
        assert f"DiLoCo, the largest dense model and SDP are planned with {layout}" in notes
        if groups == 2:
            slow = f"SDP is slower in the layout sdp.groups 4, zero_optimization.stage 0. So {PER_NODE} is planned"
            assert notes[0] == slow
        else:
            assert notes[-1] == f"With {PER_NODE}, SDP is slower"
    assert reported.count("SDP, forward") == 4


def test_sdp_has_the_layout_in_which_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, machine = load_config(FOUR), Machine((2, 2), 1e12, 1.0, 1e15, 1e15)
    peaks = [one.peak for one in candidates(config, machine, 4)[0] if one.is_sdp]
    peak = min(peaks)
    same, roomy, _ = candidates_in_the_better_layout(config, machine, 4, max(peaks))
    assert same is config and [one.groups for one in roomy if one.is_sdp] == [4] * 5
    other, tight, notes = candidates_in_the_better_layout(config, machine, 4, peak - 1)
    assert (other.sdp.groups, other.zero_optimization.stage) == (2, 3)
    assert any(one.is_sdp and one.peak < peak and one.groups == 2 for one in tight)
    assert (
        notes[0] == f"SDP does not fit in the layout sdp.groups 4, zero_optimization.stage 0. So {PER_NODE} is planned"
    )
    same, nothing, notes = candidates_in_the_better_layout(config, machine, 4, 1.0)
    assert same is config and {one.groups for one in nothing if one.is_sdp} == {4}
    assert notes[-1] == f"With {PER_NODE}, SDP does not fit"
    path = tmp_path / "my.json"
    path.write_text(json.dumps(FOUR))
    main(["advise", str(path), "--world", "4", "--gpus-per-node", "2", "--device-memory", f"{peak - 1}B", "--json"])
    beyond = json.loads(capsys.readouterr().out)["extrapolations"]
    assert any(line.startswith("tokens of a group in a step: 32 here") for line in beyond), "of two groups, not four"


def test_if_sdp_cannot_be_planned_its_layout_is_not_changed() -> None:
    """Three groups do not share four ranks."""
    config = load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"groups": 3}})
    same, found, _ = candidates_in_the_better_layout(config, Machine((2, 2), 1e12, 1.0, 1e12, 1e6), 4, 1e12)
    assert same is config and not any(one.is_sdp for one in found)


def test_a_layout_in_which_more_maskings_fit_is_better_than_a_faster_one() -> None:
    """In the layout of the file, only forward masking fits. On a fast link it is the faster one."""
    config, machine = load_config(FOUR), Machine((2, 2), 1e12, 1.0, 1e15, 1e15)
    by_name = {one.name: one for one in candidates(config, machine, 4)[0]}
    other, found, notes = candidates_in_the_better_layout(config, machine, 4, by_name["SDP, forward"].peak)
    backward = next(one for one in found if one.name == "SDP, backward")
    assert other.sdp.groups == 2 and backward.peak <= by_name["SDP, forward"].peak < by_name["SDP, backward"].peak
    refused = "SDP fits with fewer maskings in the layout sdp.groups 4, zero_optimization.stage 0"
    assert notes[0] == f"{refused}. So {PER_NODE} is planned"


@pytest.mark.parametrize(
    ("section", "slots"),
    [
        ({}, (4,)),
        ({}, (3, 1)),
        ({"groups": 2}, (1, 1, 1, 1)),
        ({"capacity": [0.5, 0.5, 0.5, 1.0]}, (2, 2)),
        ({"profile": [4, 4, 2, 2, 1, 1]}, (2, 2)),
        ({"groups": 2}, (2, 2)),
    ],
    ids=["one node", "unequal nodes", "one device a node", "capacities", "profile", "the layout of the file"],
)
def test_one_group_per_node_is_not_always_another_layout(section: dict[str, Any], slots: tuple[int, ...]) -> None:
    stage = {"zero_optimization": {"stage": 3}}
    config = load_config(CONFIG | stage | {"sdp": CONFIG["sdp"] | {"groups": 4} | section})
    assert one_group_per_node(config, Machine(slots, 1e12, 1.0, 1e12, 1e6)) is None
