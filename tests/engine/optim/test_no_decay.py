"""Weight decay for some parameters only, as with two parameter groups; parameters with names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import zero_of
from sdp.tests.support.ranks import RankPool
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.5},
    "SGD": {"lr": 0.05, "weight_decay": 0.5, "momentum": 0.9},
}
NO_DECAY = ["norms", "biases", "layers.1.*.weight"]


def exempt(name: str, model: nn.Module) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, nn.LayerNorm) or name.endswith(".bias") or name.startswith("layers.1.")


def plain(optimizer: str) -> dict[str, torch.Tensor]:
    """Train with torch alone on the rows of two ranks."""
    model = models.mlp()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if not exempt(name, model)]},
        {"params": [p for name, p in named.items() if exempt(name, model)], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    stepping = getattr(torch.optim, optimizer)(groups, **SETTINGS[optimizer])
    for step in range(3):
        stepping.zero_grad()
        for rank in range(2):
            (model(**models.micro_batch("mlp", step, 0, rank)) / 2).backward()
        stepping.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train(engine_name: str, stage: int, groups: int, optimizer: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": {**SETTINGS[optimizer], "no_decay": NO_DECAY}},
        "zero_optimization": zero_of(stage),
        "sdp": {"groups": groups, "engine": engine_name, "check_interval": 0},
    }
    engine, *_ = sdp.initialize(model=models.mlp(), config=config)
    for step in range(3):
        engine.backward(engine(models.micro_batch("mlp", step, 0, dist.get_rank())))
        engine.step()
    state, expected = engine.full_state_dict(), plain(optimizer)
    for name, value in (state or {}).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("engine", "stage", "groups", "optimizer"),
    [("fsdp2", 0, 2, "AdamW"), ("fsdp2", 3, 1, "SGD"), ("fsdp2", 2, 1, "AdamW"), ("deepspeed", 2, 1, "AdamW"),
     ("deepspeed", 3, 1, "SGD")],
)  # fmt: skip
def test_exempt_parameters_do_not_decay(ranks: RankPool, engine: str, stage: int, groups: int, optimizer: str) -> None:
    ranks.run(train, engine, stage, groups, optimizer, world=2)


@pytest.mark.usefixtures("one_rank")
def test_a_pattern_without_a_parameter_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"no_decay": ["layer.*"]}}}
    with pytest.raises(ConfigError, match=r"no_decay: .layer\.\*. fits no parameter"):
        sdp.initialize(model=models.mlp(), config=config)


# -- ``model_parameters`` and optimizers that have names -------------------------------------------

PLAIN_CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "arguments",
    [
        lambda model: {"model_parameters": model.named_parameters()},
        lambda model: {"model_parameters": list(model.named_parameters())},
        lambda model: {"model_parameters": {"params": model.parameters()}},
        lambda model: {"model_parameters": [{"params": model.named_parameters(), "lr": 0.1}]},
        lambda model: {"model_parameters": [{"params": [pair], "lr": 0.1} for pair in model.named_parameters()]},
        lambda model: {"optimizer": torch.optim.SGD(model.named_parameters(), lr=0.1)},
    ],
    ids=["iterator", "list", "one group", "group of pairs", "groups of pairs", "optimizer"],
)
def test_named_parameters_train_as_parameters_do(arguments: Callable[[nn.Module], dict[str, Any]]) -> None:
    expected = _trained(lambda model: {"model_parameters": model.parameters()})
    found = _trained(arguments)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _trained(arguments: Callable[[nn.Module], dict[str, Any]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = models.mlp()
    engine = sdp.initialize(model=model, config=PLAIN_CONFIG, **arguments(model))[0]
    engine.backward(engine(torch.ones(2, 5), torch.ones(2, 3)))
    engine.step()
    state = engine.full_state_dict()
    assert state is not None
    return state
