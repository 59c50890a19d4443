"""Learning rates by holders: every engine equals the reference, and the reference equals torch with
one rate per unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.optim.rate_scale import HolderScale, ScaledRates
from sdp.tests.support.cases import Case, assert_same_run, engine_of, native, one_step, oracle, train
from sdp.tests.support.checkpoints import assert_equal_runs, resumed
from sdp.tests.support.ranks import RankPool

SCALED = [
    Case(2, 1, lr_scale="auto", steps=4),
    Case(4, 1, lr_scale="auto", optimizer="adamw", clip=True, model="llama-tied-meta"),
    Case(2, 2, 3, lr_scale="auto", optimizer="momentum", masking="backward"),
    Case(2, 2, 2, neurons=2, lr_scale="auto", model="even-llama-tied-meta", optimizer="adamw"),
    Case(2, 1, neurons=2, tp=2, lr_scale="0.7", model="wide-llama", masking="backward"),
]


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_native_equals_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(native(ranks, case), oracle(case), case)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 0, lr_scale="auto", optimizer="adamw"),
        Case(2, 2, 2, lr_scale="auto", optimizer="adamw", clip=True),
        Case(2, 2, 3, lr_scale="auto", masking="backward"),
    ],
    ids=str,
)
def test_deepspeed_equals_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(ranks.run(train, case, "deepspeed", world=case.world), oracle(case), case)


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        (Case(2, 2, 3, lr_scale="auto", optimizer="adamw"), "fsdp2"),
        pytest.param(
            Case(2, 1, 0, neurons=2, lr_scale="0.7", optimizer="momentum", model="even-llama"),
            "fsdp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(2, 2, 1, lr_scale="auto", optimizer="adamw"), "deepspeed", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, engine: str, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), engine, world=case.world))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_reference_equals_an_optimizer_with_a_rate_for_each_unit(optimizer: Any) -> None:
    """The decay of AdamW is that of the unscaled rate."""
    case = Case(4, 1, optimizer=optimizer)
    usual, scaled = (
        engine_of(case, "reference"),
        engine_of(Case(4, 1, optimizer=optimizer, lr_scale="auto"), "reference"),
    )
    factors = HolderScale(usual.layout.placement, 1.0 if optimizer == "sgd" else 0.5)
    infos = usual.layout.parameters
    assert len({factors.of(info.unit, info.holders) for info in infos.values()}) > 3
    for step in range(2):
        before = {name: p.detach().clone() for name, p in usual.parameters_here.items()}
        for engine in (usual, scaled):
            for name, parameter in engine.parameters_here.items():
                parameter.data.copy_(before[name])
            one_step(engine, case, step, data_rank=None)
            engine.step()
        rate = usual.get_lr()[0] if step == 0 else None
        for name, parameter in usual.parameters_here.items():
            factor = factors.of(infos[name].unit, infos[name].holders)
            decay = 0.0
            if optimizer == "adamw":
                decay = 0.1 * _rate_of_step(case, step)
            kept = before[name] * (1 - decay)
            expected = kept + factor * (parameter.detach() - kept)
            torch.testing.assert_close(scaled.parameters_here[name].detach(), expected, rtol=1e-5, atol=1e-7, msg=name)
        assert rate is None or rate > 0


def _rate_of_step(case: Case, step: int) -> float:
    return oracle(case).rates[step]


@pytest.mark.parametrize(
    ("make", "is_scaled"),
    [
        (torch.optim.AdamW, False),
        (torch.optim.Adafactor, False),
        (torch.optim.Muon, False),
        (lambda *of, **more: torch.optim.RAdam(*of, **more, decoupled_weight_decay=True), False),
        (torch.optim.RAdam, True),
        (torch.optim.SGD, True),
        (torch.optim.Adam, True),
    ],
)
def test_decoupled_decay_of_an_optimizer_of_the_user_is_not_scaled(make: Any, *, is_scaled: bool) -> None:
    """Without a gradient, only the decay moves the weights."""

    def weights(factor: float) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.full((2, 2), 2.0))
        optimizer = make([parameter], lr=0.1, weight_decay=0.5)
        ScaledRates(optimizer, lambda *_: factor)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return parameter.detach()

    assert bool((weights(3.0) - weights(1.0)).abs().max() > 0.1) == is_scaled


def test_rates_of_schedules_and_logs_are_not_scaled() -> None:
    case = Case(2, 1, lr_scale="auto", optimizer="adamw")
    assert oracle(case).rates == oracle(Case(2, 1, optimizer="adamw")).rates


def test_the_mean_number_of_holders_is_weighted_by_parameters() -> None:
    layout = engine_of(Case(4, 1, model="llama-tied-meta"), "reference").layout
    scale = HolderScale(layout.placement, 1.0)
    numels = [unit.numel for unit in layout.units]
    total = sum(
        scale.of(unit.name, of) * n for unit, of, n in zip(layout.units, layout.placement.holders, numels, strict=True)
    )
    assert total == pytest.approx(sum(numels)), "the mean factor is 1"
    assert scale.of("shared", layout.everyone) == 1.0


@pytest.mark.parametrize(("placement", "is_said"), [("full", True), ("mixed", False)])
def test_it_says_where_it_has_no_effect(placement: Any, caplog: pytest.LogCaptureFixture, *, is_said: bool) -> None:
    engine_of(Case(2, 1, placement=placement, lr_scale="auto"), "reference")
    assert ("sdp.lr_scale auto has no effect: every unit has 2 holders" in caplog.text) == is_said


def test_it_says_by_what_the_rates_are_multiplied(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "sdp"):
        engine = engine_of(Case(2, 1, placement="mixed", lr_scale="1.0"), "reference")
    placement = engine.layout.placement
    mean = sum(len(of) * cost for of, cost in zip(placement.holders, placement.costs, strict=True)) / sum(
        placement.costs
    )
    factors = f"{1 / mean:.2f} (1 holder) to {2 / mean:.2f} (2 holders)"
    assert f"multiplies the learning rates of units by {factors}" in caplog.text


def test_it_is_refused_with_local_steps() -> None:
    with pytest.raises(ConfigError, match=r"sdp\.lr_scale.*no meaning with sdp\.sync"):
        load_config({"train_batch_size": 4, "sdp": {"groups": 2, "lr_scale": "auto", "sync": {"every": 2}}})
