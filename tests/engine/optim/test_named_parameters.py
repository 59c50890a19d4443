"""``model_parameters`` and optimizers that have names."""

from collections.abc import Callable
from typing import Any

import pytest
import sdp
import torch
from sdp.tests.support.models import mlp
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")
CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


@pytest.mark.parametrize(
    "parameters",
    [
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: {"params": model.parameters()},
        lambda model: [{"params": model.named_parameters(), "lr": 0.1}],
        lambda model: [{"params": [pair], "lr": 0.1} for pair in model.named_parameters()],
    ],
    ids=["iterator", "list", "one group", "group of pairs", "groups of pairs"],
)
def test_named_parameters_train_as_parameters_do(parameters: Callable[[nn.Module], Any]) -> None:
    expected = _trained(lambda model: {"model_parameters": model.parameters()})
    found = _trained(lambda model: {"model_parameters": parameters(model)})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_optimizer_with_names() -> None:
    expected = _trained(lambda model: {"model_parameters": model.parameters()})
    found = _trained(lambda model: {"optimizer": torch.optim.SGD(model.named_parameters(), lr=0.1)})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _trained(arguments: Callable[[nn.Module], dict[str, Any]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = mlp()
    engine = sdp.initialize(model=model, config=CONFIG, **arguments(model))[0]
    engine.backward(engine(torch.ones(2, 5), torch.ones(2, 3)))
    engine.step()
    state = engine.full_state_dict()
    assert state is not None
    return state
