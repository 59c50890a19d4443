"""A scheduler object must steer the optimizer that takes the steps."""

from __future__ import annotations

import pytest
import sdp
import torch
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.ranks import RankPool
from torch.optim.lr_scheduler import LambdaLR


@pytest.mark.usefixtures("one_rank")
def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = models.build("mlp")
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for optimizer in (
        None,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda parameters: torch.optim.SGD(parameters),
    ):
        config = Case(1, 1).config(scheduler=None)
        with pytest.raises(ConfigError, match="LambdaLR in lr_scheduler was built on another optimizer"):
            sdp.initialize(
                model=model, config=config, optimizer=optimizer, lr_scheduler=LambdaLR(other, lambda step: 0.5**step)
            )


@pytest.mark.usefixtures("one_rank")
def test_a_scheduler_of_the_given_optimizer_sets_its_rate() -> None:
    model, case = models.build("mlp"), Case(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    config = case.config(scheduler=None, optimizer=None)
    engine = sdp.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=schedule)[0]
    one_step(engine, case, 0, data_rank=0)
    engine.step()
    assert engine.get_lr() == [0.5]


def _start_with_rules_of_two_groups() -> str:
    model = models.build("mlp")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    config = Case(2, 1, 1).config("deepspeed", scheduler=None, optimizer=None)
    with pytest.raises(ConfigError) as caught:
        sdp.initialize(
            model=model,
            config=config,
            model_parameters=[{"params": matrices}, {"params": others}],
            optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5]),
        )
    return str(caught.value)


def test_a_schedule_for_other_groups_than_deepspeeds_is_one_line(ranks: RankPool) -> None:
    """With several SDP groups, DeepSpeed gets a parameter group for each unit."""
    pytest.importorskip("deepspeed")
    for message in ranks.run(_start_with_rules_of_two_groups, world=2):
        assert message.startswith("lr_scheduler: Expected ")
        assert (
            'parameter groups, one for each unit: give one rule for all of them, or use sdp.engine "fsdp2"' in message
        )
        assert "\n" not in message
