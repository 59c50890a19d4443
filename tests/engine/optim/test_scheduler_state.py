"""A resume under the user's own schedule has the rates of the unbroken run."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import CheckpointError, ConfigError
from sdp.engine.optim.schedules import adapt_state, keep_shared_state, of_another_kind
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.ranks import RankPool
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

OWN, WARMUP = 0.05, {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def falling(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def stairs(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 3, 0.1)


def build(
    case: Case,
    engine: str,
    scheduler: Callable[[Optimizer], Any] | dict[str, Any] | None,
    alone: int | None = 1,
    rate: float = 0.01,
) -> sdp.SDPEngine:
    """Rank 0 lacks layer 1, rank 1 layer 0; the layer ``alone`` has a rate of its own."""
    model = models.mlp()
    placement = {f"layers.{index}": [0, 1] for index in range(len(model.layers))} | {"layers.0": [0], "layers.1": [1]}
    config = case.config(engine)
    config["sdp"] |= {"placement": placement, "units": ["layers.*"]}
    del config["scheduler"]
    if isinstance(scheduler, dict):
        config["scheduler"], scheduler = scheduler, None
    own = list(model.layers[alone].parameters()) if alone is not None else []
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in own)]
    members = [{"params": others, "lr": rate}, *([{"params": own, "lr": OWN}] if own else [])]
    return sdp.initialize(model=model, model_parameters=members, lr_scheduler=scheduler, config=config)[0]


def stepped(engine: sdp.SDPEngine, case: Case, index: int) -> dict[str, float]:
    one_step(engine, case, index, data_rank=dist.get_rank())
    engine.step()
    return engine.rates_of_parameters()


def _unbroken_and_resumed(folder: str, stage: int, wrote: str, reads: str) -> tuple[Any, Any]:
    case = Case(2, 1, stage=stage)
    unbroken = build(case, wrote, falling)
    for index in range(2):
        stepped(unbroken, case, index)
    unbroken.save_checkpoint(folder)
    resumed = build(case, reads, falling)
    resumed.load_checkpoint(folder)
    return [stepped(unbroken, case, index) for index in (2, 3)], [stepped(resumed, case, index) for index in (2, 3)]


OVER_ENGINES = [
    (1, "deepspeed", "deepspeed"),
    (2, "deepspeed", "deepspeed"),
    (1, "fsdp2", "deepspeed"),
    (1, "deepspeed", "fsdp2"),
]


@pytest.mark.parametrize(
    ("stage", "wrote", "reads"),
    [(0, "fsdp2", "fsdp2"), *(pytest.param(*each, marks=needs_deepspeed) for each in OVER_ENGINES)],
)
def test_rates_go_on(ranks: RankPool, tmp_path: Path, stage: int, wrote: str, reads: str) -> None:
    for unbroken, resumed in ranks.run(_unbroken_and_resumed, str(tmp_path), stage, wrote, reads, world=2):
        assert resumed == unbroken
        assert sorted(set(unbroken[1].values())) == pytest.approx([0.01 / 5, OWN / 5])


def _refused(folder: str, kind: str) -> tuple[str, bool]:
    case = Case(2, 1)
    wrote, reads = {
        "scheduler": (partial(build, case, "fsdp2", falling), partial(build, case, "fsdp2", WARMUP)),
        "stairs": (partial(build, case, "fsdp2", WARMUP), partial(build, case, "fsdp2", stairs)),
        "merged": (partial(build, case, "fsdp2", None, 2), partial(build, case, "fsdp2", None, None, 0.02)),
    }[kind]
    engine = wrote()
    stepped(engine, case, 0)
    engine.save_checkpoint(folder)
    engine = reads()
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters_here.items()}
    rates = engine.rates_of_parameters()
    with pytest.raises(CheckpointError) as refusal:
        engine.load_checkpoint(folder)
    same = all(torch.equal(before[name], parameter) for name, parameter in engine.parameters_here.items())
    return str(
        refusal.value
    ), same and not engine.optimizer.state and engine.global_steps == 0 and rates == engine.rates_of_parameters()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scheduler", "has the state of another kind of learning-rate scheduler"),
        ("stairs", "has the state of another kind of learning-rate scheduler"),
        ("merged", "which are in one group of this optimizer; make the same parameter groups as"),
    ],
)
def test_what_cannot_go_on_is_refused_and_changes_nothing(
    ranks: RankPool, tmp_path: Path, kind: str, message: str
) -> None:
    for refusal, unchanged in ranks.run(_refused, str(tmp_path), kind, world=2):
        assert message in refusal
        assert unchanged


def test_what_is_of_groups_is_the_ranks_own() -> None:
    inner = {"base_lrs": [0.1], "last_epoch": 3}
    saved = {"last_epoch": 5, "base_lrs": [1.0, 2.0], "_schedulers": [inner, inner], "_milestones": [4]}
    assert keep_shared_state(saved) == {"last_epoch": 5, "_schedulers": [{"last_epoch": 3}] * 2}
    own = {
        "last_epoch": 0,
        "base_lrs": [3.0],
        "_schedulers": [{"base_lrs": [7.0], "last_epoch": 0}] * 2,
        "_milestones": [4],
    }
    assert adapt_state(keep_shared_state(saved), own) == {
        "last_epoch": 5, "base_lrs": [3.0], "_schedulers": [{"base_lrs": [7.0], "last_epoch": 3}] * 2,
        "_milestones": [4]
    }  # fmt: skip
    assert adapt_state(saved, own)["base_lrs"] == [3.0]  # of another number of groups
    assert adapt_state({"base_lrs": [9.0]}, own)["base_lrs"] == [9.0]
    assert adapt_state({"milestones": {"3": 1}}, {"milestones": Counter([3])}) == {"milestones": Counter([3])}
    assert of_another_kind({"last_batch_iteration": 1}, {"last_epoch": 0})
    assert not of_another_kind({"last_epoch": 1, "gamma": 1}, {"last_epoch": 0, "base_lrs": []})
    assert not of_another_kind(None, {"last_epoch": 0})


# -- a scheduler object must steer the optimizer that takes the steps ------------------------------


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
        assert 'parameter groups, one for each unit; give one rule for all groups, or use sdp.engine "fsdp2"' in message
        assert "\n" not in message
