"""Learning rates by holders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.optim.schedules import HolderScale, ScaledRates
from sdp.tests.support.cases import Case, assert_same_run, engine_of, oracle, oracle_of, said, train
from sdp.tests.support.checkpoints import assert_equal_runs, resumed
from sdp.tests.support.ranks import RankPool


@pytest.mark.parametrize(
    "case",
    [Case(2, 2, 2, lr_scale="auto", optimizer="adamw", clip=True), Case(2, 2, 3, lr_scale="auto", masking="backward")],
    ids=str,
)
def test_deepspeed_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    assert_same_run(ranks.run(train, case, "deepspeed", world=case.world), oracle(case), case)


def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 1, lr_scale="auto", optimizer="adamw")
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), "fsdp2", world=case.world))


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


def test_the_mean_number_of_holders_is_weighted_by_parameters() -> None:
    layout = oracle_of(Case(4, 1, model="llama-tied-meta")).layout
    scale = HolderScale(layout.placement, 1.0)
    numels = [unit.numel for unit in layout.units]
    total = sum(
        scale.of(unit.name, of) * n for unit, of, n in zip(layout.units, layout.placement.holders, numels, strict=True)
    )
    assert total == pytest.approx(sum(numels)), "the mean factor is 1"
    assert scale.of("shared", layout.everyone) == 1.0


def _said(case: Case) -> str:
    with said() as lines:
        engine_of(case)
    return "\n".join(lines)


def test_it_says_by_what_the_rates_are_multiplied(ranks: RankPool) -> None:
    case = Case(2, 1, lr_scale="1.0")
    placement = oracle_of(case).layout.placement
    total = sum(len(of) * cost for of, cost in zip(placement.holders, placement.costs, strict=True))
    mean = total / sum(placement.costs)
    factors = f"{1 / mean:.2f} (1 holder) to {2 / mean:.2f} (2 holders)"
    assert f"multiplies the learning rates of units by {factors}" in ranks.run(_said, case, world=2)[0]
    equal = ranks.run(_said, replace(case, placement="full"), world=2)[0]
    assert "sdp.lr_scale 1.0 has no effect: every unit has 2 holders" in equal


def test_it_is_refused_with_local_steps() -> None:
    with pytest.raises(ConfigError, match=r"sdp\.lr_scale.*no meaning with sdp\.sync"):
        load_config({"train_batch_size": 4, "sdp": {"groups": 2, "lr_scale": "auto", "sync": {"every": 2}}})
