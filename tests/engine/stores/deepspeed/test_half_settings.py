"""Settings of half precision under DeepSpeed: which are passed on, and which are refused."""

import importlib
import importlib.util
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, zero_of
from sdp.tests.support.deepspeed_runs import FP16, float16_here
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
ZERO = {"zero_optimization": {"stage": 1}, "sdp": {"engine": "deepspeed"}}
REFUSED = [
    ({"bf16": {"enabled": True}}, "fp16.enabled: true together with bf16.enabled"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale: input should be greater than or equal to 0"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window: input should be greater than 0"),
    ({"fp16": {"enabled": True, "min_loss_scale": 4, "initial_scale_power": 1}},
        "fp16: min_loss_scale 4 is more than the scale at"),
    ({"fp16": {"enabled": True, "loss_scales": 1}}, "fp16.loss_scales: unknown key, did you mean loss_scale?"),
    ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast: true cannot be honoured"),
    ({"amp": {"enabled": True}},
        'amp.enabled: true cannot be honoured by sdp.engine "deepspeed": DeepSpeed has removed it; use'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"), REFUSED, ids=lambda value: "" if isinstance(value, str) else str(value)[:60]
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"fp16": {"enabled": True}, **ZERO, **section})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_fp16_goes_to_deepspeed_and_through_a_resolved_file() -> None:
    config = load_config({"fp16": FP16, **ZERO})
    assert config.deepspeed["fp16"] == FP16
    assert (config.precision, config.compute_bytes) == ("float16", 2)
    again = load_config(config.resolved())
    assert again.fp16 == config.fp16
    assert again.deepspeed["fp16"].items() >= FP16.items()


def _without_float16() -> str:
    with float16_here(False), pytest.raises(ConfigError) as caught:
        engine_of(Case(2, 1, stage=1), "deepspeed", fp16=FP16)
    return str(caught.value)


def test_a_device_without_float16_is_told_in_one_line(ranks: RankPool) -> None:
    for message in ranks.run(_without_float16, world=2):
        assert message.startswith('sdp.engine "deepspeed": DeepSpeed refuses its configuration (')
        assert "fp16" in message and "\n" not in message


MICROS = 64


class Weighed(models.Mlp):
    """Its gradient has the size of the batch's last number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.head(hidden) * y).sum()


def _moved(engine_name: str, stage: int, groups: int, more: dict[str, Any]) -> torch.Tensor | None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": zero_of(stage),
        "sdp": {"groups": groups, "capacity": 1.0, "engine": engine_name},
        **more,
    }
    engine = sdp.initialize(model=Weighed(), config=config)[0]
    before = engine.full_state_dict()
    kind = torch.bfloat16 if engine_name == "deepspeed" else torch.float32
    x = torch.ones(2, models.IN, dtype=kind)
    for micro in range(MICROS):
        y = torch.full((2, models.OUT), 1.0 if micro == 0 else 1 / 512, dtype=kind)
        engine.backward(engine(x, y))
        engine.step()
    after = engine.full_state_dict()
    return None if after is None or before is None else after["head.bias"] - before["head.bias"]


@pytest.mark.parametrize(
    ("engine", "stage", "groups", "more"),
    [
        *(("deepspeed", stage, groups, {}) for stage, groups in ((1, 2), (2, 1), (3, 2))),
        ("deepspeed", 3, 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
        *(("fsdp2", stage, 1, {}) for stage in (0, 2)),
    ],
)
def test_small_gradients_of_many_micro_batches_are_not_lost(
    ranks: RankPool, engine: str, stage: int, groups: int, more: dict[str, Any]
) -> None:
    """One large and 63 small gradients. A sum in bfloat16 would be 0.89 of the exact one."""
    exact = -2 * (1 + (MICROS - 1) / 512) / MICROS  # two rows; the head's bias has the gradient y
    moved = ranks.run(_moved, engine, stage, groups, more, world=2)[0]
    assert moved.tolist() == pytest.approx([exact] * models.OUT, rel=4e-3)
