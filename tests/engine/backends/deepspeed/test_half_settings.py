"""Settings of half precision under DeepSpeed: which are passed on, and which are refused."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support.deepspeed_runs import FP16, float16_here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


REFUSED = [
    ({"bf16": {"enabled": True}}, "fp16.enabled: true together with bf16.enabled"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale: input should be greater than or equal to 0"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window: input should be greater than 0"),
    (
        {"fp16": {"enabled": True, "min_loss_scale": 4, "initial_scale_power": 1}},
        "fp16: min_loss_scale 4 is more than the scale at",
    ),
    ({"fp16": {"enabled": True, "loss_scales": 1}}, "fp16.loss_scales: unknown key, did you mean loss_scale?"),
    ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast: true cannot be honoured"),
    (
        {"amp": {"enabled": True}},
        'amp.enabled: true cannot be honoured by sdp.engine "deepspeed": DeepSpeed has removed it; use',
    ),
]


@pytest.mark.parametrize(
    ("section", "message"), REFUSED, ids=lambda value: "" if isinstance(value, str) else str(value)[:60]
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"fp16": {"enabled": True}, "sdp": {"engine": "deepspeed"}, **section})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_fp16_goes_to_deepspeed_and_through_a_resolved_file() -> None:
    config = load_config({"fp16": FP16, "sdp": {"engine": "deepspeed"}})
    assert config.deepspeed["fp16"] == FP16
    assert (config.precision, config.compute_bytes) == ("float16", 2)
    again = load_config(config.resolved())
    assert again.fp16 == config.fp16
    assert again.deepspeed["fp16"].items() >= FP16.items()


def test_a_device_without_float16_is_told() -> None:
    from sdp.engine.backends.deepspeed.private import require_float16

    with (
        float16_here(False),
        pytest.raises(ConfigError, match=r"^fp16.enabled: true is not supported on .*; use bf16$"),
    ):
        require_float16()
    with float16_here():
        require_float16()


def test_weights_laid_side_by_side_are_refused() -> None:
    """DeepSpeed does so for its FusedAdam, which runs on GPUs alone: of the optimizer that it makes
    only what tells them apart is here.
    """
    from sdp.engine.backends.deepspeed import private
    from sdp.engine.backends.deepspeed.private import check_engine, load

    package = load()
    engine = SimpleNamespace(**dict.fromkeys(private.OF_ENGINE.split()), optimizer=SimpleNamespace(fp32_groups_flat=[]))
    with pytest.raises(
        ConfigError,
        match=r"^bfloat16 at zero_optimization.stage 0: DeepSpeed flattens .*; set optimizer.params.torch_adam",
    ):
        check_engine(package, engine, 0, "bfloat16")
