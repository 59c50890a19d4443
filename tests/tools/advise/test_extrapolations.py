"""``sdp advise`` says in which respects a run differs from where losses were measured."""

from __future__ import annotations

from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.tests.tools.advise.made_up import CONFIG, made_up_evidence
from sdp.tools.advise.candidate import Candidate
from sdp.tools.advise.verdict import decide, extrapolations

pytestmark = pytest.mark.usefixtures("traced_once")


# What differs in every run here: the largest dense model has a capacity of its own, and the effect
# of more steps was not measured with local steps.
ALWAYS = ["capacity", "faster steps"]


def _kinds(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_figures_of_another_length_of_training_are_called_an_extrapolation(slow: list[Candidate]) -> None:
    evidence = made_up_evidence()
    setting = evidence.setting.model_copy(update={"tokens_per_parameter": (0.01, 200.0)})
    curves = {method: [(0.01, 5.0), (10_000.0, 4.0)] for method in evidence.curves}
    evidence = evidence.model_copy(update={"setting": setting, "curves": curves})
    verdict, config = decide(slow, None, evidence), load_config(CONFIG)
    parameters = verdict.reference.parameters
    near = extrapolations(verdict, evidence, config, 16, 0.1 * parameters)
    assert _kinds(near) == ALWAYS
    assert near[0].endswith("0.5 where the losses of these were measured: largest dense at SDP's peak")
    assert "not for DiLoCo; smaller dense, DiLoCo; SDP, backward, local steps; SDP, forward, local steps" in near[1]
    line, *others = extrapolations(verdict, evidence, config, 16, 20.0 * parameters)
    assert line.startswith("tokens per parameter: 20 here, 0.05 where the losses of these were measured: ")
    assert "SDP, forward, local steps" in line and "DDP" not in line and others == near
    line, *others, steps = extrapolations(verdict, evidence, config, 16, 5000.0 * parameters)
    assert line == "tokens per parameter: 5,000 here, 0.01 to 200 where losses were measured" and others == near
    assert steps.startswith("faster or slower steps: their effect was measured from 0.01 to 10000 tokens")
    assert "SDP, forward, local steps" in steps and "FSDP" not in steps, "30,000 tokens per parameter are near"


def test_a_run_unlike_the_measured_ones_is_called_an_extrapolation(fast: list[Candidate]) -> None:
    evidence = made_up_evidence()
    verdict = decide(fast, None, evidence)
    parameters = verdict.reference.parameters
    config = load_config(CONFIG)
    assert _kinds(extrapolations(verdict, evidence, config, 16, 0.05 * parameters)) == ALWAYS
    many = config.model_copy(update={"sdp": config.sdp.model_copy(update={"groups": 64})})
    assert _kinds(extrapolations(verdict, evidence, many, 4096, 20.0 * parameters)) == [
        "groups",
        "tokens of a group in a step",
        "tokens per parameter",
        *ALWAYS,
        "faster or slower steps",
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sdp": {"profile": "uniform"}}, "sdp.profile: uniform here, depth where losses were measured"),
        ({"sdp": {"lr_scale": "none"}}, "sdp.lr_scale: none here, 0.5 where losses with averages in every step"),
        ({"sdp": {"granularity": "neuron", "neuron_groups": 2}}, "sdp.granularity: neuron here, block where"),
        ({"optimizer": {"type": "SGD"}}, "optimizer: SGD here, AdamW where losses were measured"),
    ],
)
def test_another_recipe_is_called_an_extrapolation(
    fast: list[Candidate], change: dict[str, dict[str, Any]], line: str
) -> None:
    evidence = made_up_evidence()
    config = load_config(CONFIG | {key: CONFIG[key] | value for key, value in change.items()})
    verdict = decide(fast, None, evidence)
    *others, found = extrapolations(verdict, evidence, config, 16, 0.05 * verdict.reference.parameters)
    assert found.startswith(line) and _kinds(others) == ALWAYS


def test_figures_of_another_number_of_groups_or_capacity_are_named(fast: list[Candidate]) -> None:
    evidence = made_up_evidence()
    gaps = [gap.model_copy(update={"groups": 16}) for gap in evidence.gaps if gap.capacity != 0.5]
    evidence = evidence.model_copy(
        update={"gaps": gaps, "setting": evidence.setting.model_copy(update={"groups": (2, 16)})}
    )
    verdict = decide(fast, None, evidence)
    lines = extrapolations(verdict, evidence, load_config(CONFIG), 16, 0.05 * verdict.reference.parameters)
    groups, *_, capacity = [line for line in lines if "of these were measured" in line]
    assert (
        groups.startswith("groups: 2 here, 16 where the losses of these were measured: ") and "SDP, forward" in groups
    )
    assert capacity.startswith("capacity: ") and "0.25 where the losses of these were measured" in capacity
