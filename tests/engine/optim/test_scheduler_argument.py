"""A scheduler object must steer the optimizer that takes the steps."""

from __future__ import annotations

import pytest
import sdp
import torch
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step
from torch.optim.lr_scheduler import LambdaLR


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = models.build("mlp")
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for optimizer in (
        None,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda parameters: torch.optim.SGD(parameters),
    ):
        config = Case(2, 1).config("reference", scheduler=None)
        with pytest.raises(ConfigError, match="LambdaLR in lr_scheduler was built on another optimizer"):
            sdp.initialize(
                model=model, config=config, optimizer=optimizer, lr_scheduler=LambdaLR(other, lambda step: 0.5**step)
            )


def test_a_scheduler_of_the_given_optimizer_sets_its_rate() -> None:
    model, case = models.build("mlp"), Case(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    config = case.config("reference", scheduler=None, optimizer=None)
    engine = sdp.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=schedule)[0]
    one_step(engine, case, 0, data_rank=None)
    engine.step()
    assert engine.get_lr() == [0.5]
