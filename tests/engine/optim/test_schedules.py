"""Schedules: DeepSpeed's values at every step, WSD, restarts, and what is refused."""

import logging
import math
import re

import pytest
import torch
from sdp.engine.errors import CheckpointError, ConfigError
from sdp.engine.optim.schedules import build_scheduler

CASES = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 50, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": [0.2, 0.3], "warmup_num_steps": 7}),
    ("WarmupDecayLR", {"total_num_steps": 300, "warmup_num_steps": 50}),
    ("WarmupDecayLR", {"total_num_steps": 200, "warmup_num_steps": 50, "warmup_type": "linear", "warmup_min_lr": 1e-4}),
    ("WarmupDecayLR", {"total_num_steps": 200, "warmup_max_lr": None, "warmup_num_steps": 20}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 100}),
    ("WarmupCosineLR", {"total_num_steps": 300, "warmup_num_steps": 50}),
    ("WarmupCosineLR", {"total_num_steps": 250, "warmup_num_steps": 50, "warmup_type": "linear", "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 250, "warmup_num_steps": 3, "warmup_min_ratio": 0.3}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 100}),
]
WSD = {"total_num_steps": 100, "warmup_num_steps": 10, "decay_num_steps": 20}


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.3, 0.07)]
    return torch.optim.SGD(groups)


def rates(target: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in target.param_groups]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_every_step_equals_deepspeed(name, params, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs_module = pytest.importorskip("deepspeed.runtime.lr_schedules")
    mine, theirs = optimizer(), optimizer()
    schedule = build_scheduler(name, params, mine)
    reference = getattr(theirs_module, name)(theirs, **params)
    for iteration in range(400):
        assert rates(mine) == rates(theirs), iteration
        assert schedule.get_last_lr() == reference.get_last_lr()
        assert schedule.get_lr() == reference.get_lr()
        schedule.step()
        reference.step()
    assert schedule.state_dict() == reference.state_dict()
    schedule.step(17)
    reference.step(17)
    assert rates(mine) == rates(theirs)


def wsd_ratios(steps: int, **params) -> list[float]:
    target = optimizer()
    schedule = build_scheduler("WSD", WSD | params, target)
    ratios = []
    for _ in range(steps):
        ratios.append(rates(target)[0] / 0.3)
        schedule.step()
    return ratios


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("1-sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_wsd_phases(decay_type, shape, low):
    ratios = wsd_ratios(120, decay_type=decay_type, min_lr_ratio=low)
    assert ratios[:10] == pytest.approx([(t + 1) / 10 for t in range(10)])
    assert ratios[10:81] == pytest.approx([1.0] * 71)
    assert ratios[80:100] == pytest.approx([low + (1 - low) * shape(t / 20) for t in range(20)])
    assert ratios[100:] == pytest.approx([low] * 20)


def test_wsd_defaults_to_one_minus_sqrt():
    assert wsd_ratios(120) == wsd_ratios(120, decay_type="1-sqrt", min_lr_ratio=0.0)
    assert wsd_ratios(3, warmup_num_steps=0) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("steps", [0, 1, 25, 95])
@pytest.mark.parametrize(("name", "params"), [*CASES, ("WSD", WSD)])
def test_a_restart_continues_the_same_values(name, params, steps):
    first, second = optimizer(), optimizer()
    before = build_scheduler(name, params, first)
    for _ in range(steps):
        before.step()
    after = build_scheduler(name, params, second)
    after.load_state_dict(before.state_dict())
    for _ in range(100):
        assert rates(first) == rates(second)
        assert before.get_last_lr() == after.get_last_lr()
        before.step()
        after.step()


def test_a_tensor_rate_is_filled_in_place():
    rate = torch.tensor(0.3)
    target = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
    schedule = build_scheduler("WSD", WSD, target)
    schedule.step()
    assert target.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.06)


@pytest.mark.parametrize("state", [{}, {"last_batch_iteration": "3"}, {"last_batch_iteration": -2}])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(CheckpointError, match=r"last_batch_iteration .* is not an integer"):
        build_scheduler("WSD", WSD, optimizer()).load_state_dict(state)


def test_all_warmup_is_announced(caplog):
    with caplog.at_level(logging.WARNING):
        build_scheduler("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 20}, optimizer())
    assert "total_num_steps 10 is less than warmup_num_steps 20" in caplog.text


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLRR", {}, 'scheduler.type: unknown schedule "WarmupLRR", did you mean WarmupLR?'),
        ("Steps", {}, 'scheduler.type: unknown schedule "Steps"; known: WarmupLR, WarmupDecayLR'),
        ("WarmupDecayLR", {"total_num_steps": "auto"},
            'scheduler.params.total_num_steps: "auto" needs a number of steps'),
        ("WarmupCosineLR", {}, "scheduler.params.total_num_steps: this key is required"),
        ("WarmupLR", {"warmup_steps": 5}, "scheduler.params.warmup_steps: unknown key, did you mean warmup_num_steps?"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps: input should be greater than 0"),
        ("WarmupLR", {"warmup_type": "lin"}, "scheduler.params.warmup_type: input should be 'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": "1"},
            "scheduler.params.warmup_max_lr: input should be a valid number or input should be a valid list (found "
            '"1")'),
        ("WarmupLR", {"warmup_max_lr": [0.1, -1]}, "scheduler.params.warmup_max_lr.1: input should be greater than or"),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, "scheduler.params.warmup_min_lr: 1 rates for 2 parameter groups"),
        ("WarmupLR", {"last_batch_iteration": 5},
            "scheduler.params.last_batch_iteration: input should be -1 (found 5)"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 2},
            "scheduler.params.cos_min_ratio: input should be"),
        ("WSD", WSD | {"decay_num_steps": 95}, "warmup_num_steps 10 + decay_num_steps 95 exceed total_num_steps 100"),
        ("WSD", WSD | {"decay_type": "sqrt"},
            "scheduler.params.decay_type: input should be 'linear', 'cosine' or '1-sq"),
    ],
)  # fmt: skip
def test_bad_sections_are_refused_in_one_line(name, params, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_scheduler(name, params, optimizer())
    assert "\n" not in str(error.value)
