"""Lion, LAMB and Adam without bias correction: the steps of implementations that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.optim.optimizer_state import OptimizerState, materialise_state
from sdp.engine.optim.optimizers import build_optimizer, check_optimizer
from sdp.tests.support.cases import Case, assert_same_run, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")
STEPS = 6
Before = Callable[[torch.optim.Optimizer, int], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, before: Before | None = None) -> list[torch.Tensor]:
    """Train, and return the whole weights. ``before`` may change the settings of each step."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        if before is not None:
            before(optimizer, step)
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in model.parameters()]


def ours(name: str, params: dict[str, Any], *, sharded: bool = False) -> list[torch.Tensor]:
    model = network()
    if sharded:
        fully_shard(model)
    optimizer, _ = build_optimizer(name, params, model.parameters(), CPU)
    return run(model, optimizer)


def lion() -> list[torch.Tensor]:
    model = network()
    return run(model, pytorch_optimizer.Lion(model.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1))


def lamb(*, corrects: bool) -> list[torch.Tensor]:
    """``adam_debias`` leaves out the package's bias correction.

    DeepSpeed's changes the length of the step alone.
    """

    def correct(optimizer: torch.optim.Optimizer, step: int) -> None:
        factor = (1 - 0.95**step) ** 0.5 / (1 - 0.8**step) if corrects else 1.0
        optimizer.param_groups[0]["lr"] = 0.01 * factor

    model = network()
    settings = {"eps": 1e-8, "weight_decay": 0.1, "weight_decouple": False, "max_grad_norm": 0.0, "adam_debias": True}
    optimizer = pytorch_optimizer.Lamb(model.parameters(), lr=0.01, betas=(0.8, 0.95), **settings)
    return run(model, optimizer, correct)


def uncorrected(*, decoupled: bool) -> list[torch.Tensor]:
    """torch's Adam, with settings per step that cancel its bias correction."""

    def cancel(optimizer: torch.optim.Optimizer, step: int) -> None:
        first, second = 1 - 0.8**step, (1 - 0.95**step) ** 0.5
        group = optimizer.param_groups[0]
        group |= {"lr": 0.01 * first / second, "eps": 1e-6 / second}
        if decoupled:
            group["weight_decay"] = 0.1 * second / first

    model = network()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return run(model, kind(model.parameters(), betas=(0.8, 0.95), weight_decay=0.1), cancel)


COMMON: dict[str, Any] = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}
ADAM: dict[str, Any] = {**COMMON, "eps": 1e-6, "bias_correction": False}
WIDE: dict[str, Any] = {**COMMON, "max_coeff": 1e3, "min_coeff": 0.0}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], list[torch.Tensor]]]] = {
    "Lion": ("Lion", COMMON, lion),
    "Lamb": ("lamb", WIDE | {"bias_correction": False}, lambda: lamb(corrects=False)),
    "Lamb with bias correction": ("LAMB", WIDE, lambda: lamb(corrects=True)),
    "AdamW": ("AdamW", ADAM, lambda: uncorrected(decoupled=True)),
    "Adam": ("Adam", ADAM, lambda: uncorrected(decoupled=True)),
    "plain Adam": ("FusedAdam", ADAM | {"adam_w_mode": False}, lambda: uncorrected(decoupled=False)),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_another_implementation(case: str, sharded: bool, one_rank: None) -> None:
    name, params, theirs = CASES[case]
    for mine, other in zip(ours(name, params, sharded=sharded), theirs(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_the_ratio_of_lamb_stays_between_its_coefficients() -> None:
    """The first step of a single weight is (m / √v) × the ratio, and m / √v is known."""
    for weight, bounds, ratio in ((100.0, (0.01, 5.0), 5.0), (0.001, (0.3, 5.0), 0.3), (0.0, (0.3, 5.0), 1.0)):
        parameter = nn.Parameter(torch.full((1,), weight))
        settings = {"lr": 1.0, "betas": [0.0, 0.0], "eps": 0.0, "min_coeff": bounds[0], "max_coeff": bounds[1]}
        optimizer, _ = build_optimizer("Lamb", settings | {"bias_correction": False}, [parameter], CPU)
        parameter.grad = torch.full((1,), 3.0)
        optimizer.step()
        assert parameter.item() == pytest.approx(weight - ratio)


@pytest.mark.parametrize("name", ["Lion", "Lamb", "Adam"])
def test_a_state_that_is_made_early_changes_nothing(name: str) -> None:
    model = network()
    optimizer, _ = build_optimizer(name, ADAM if name == "Adam" else COMMON, model.parameters(), CPU)
    materialise_state(optimizer)
    for before, after in zip(network().parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after)
    state = OptimizerState(optimizer)
    assert all("exp_avg" in state.of(parameter, "w") for parameter in model.parameters())


SECTIONS: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "Adam": {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2, "bias_correction": False}},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_sharded_groups_equal_the_reference(name: str, ranks: Any) -> None:
    """Whole norms over the shards of two ranks, in two groups that share some units."""
    case = Case(2, 2, 3 if name == "Lamb" else 1, clip=True)
    results = ranks.run(train_with, case, SECTIONS[name], world=case.world)
    assert_same_run(results, train(case, "reference", optimizer=SECTIONS[name]), case)


def train_with(case: Case, optimizer: dict[str, Any]) -> Any:
    return train(case, optimizer=optimizer)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size above 1"),
        ({"sdp": {"granularity": "neuron"}}, 'sdp.granularity "neuron"'),
        ({"sdp": {"engine": "deepspeed"}, "zero_optimization": {"stage": 1}}, 'sdp.engine "deepspeed" at zero'),
    ],
)
def test_lamb_is_refused_where_parameters_are_taken_apart(section: dict[str, Any], reason: str) -> None:
    config = load_config({"optimizer": {"type": "LAMB"}, **section})
    with pytest.raises(ConfigError) as caught:
        check_optimizer(config, None)
    assert reason in str(caught.value)
    check_optimizer(config, torch.optim.SGD)
