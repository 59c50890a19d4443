"""Which settings go to DeepSpeed, also those of half precision, and which are refused."""

import importlib
import importlib.util
import json
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step, zero_of
from sdp.tests.support.deepspeed_runs import FP16, float16_here
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
REFUSED = [
    ({"zero_optimization": {"round_robin_gradients": True}},
        "zero_optimization.round_robin_gradients: true cannot be honoured"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        'zero_optimization.offload_optimizer.device: "nvme" cannot'),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}},
        'zero_optimization.offload_param.device: "cpu" cannot be honoured'),
    ({"zero_optimization": {"param_alignment": 8}}, "zero_optimization.param_alignment: unknown key"),
    ({"tensor_parallel": {"autotp_size": 2}},
        'tensor_parallel.autotp_size: 2 is not available in this version together with sdp.engine "deepspeed"'),
    ({"training": {"compile": True}},
        'training.compile: true is not available in this version together with sdp.engine "deepspeed"'),
    ({"communication_data_type": "bf16"}, 'communication_data_type: "bf16" cannot be honoured'),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype: "bf16" cannot be honoured'),
    ({"elasticity": {"enabled": True}}, "elasticity.enabled: true cannot be honoured"),
    ({"quantize_training": {"quantize_groups": 1}}, "quantize_training: "),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled: true cannot be honoured"),
    ({"mesh_param": [2, 2]}, "mesh_param: unknown key"),
    ({"sdp": {"sync": {"every": 2}}}, 'sdp.sync: local steps are not available with sdp.engine "deepspeed"; use'),
    ({"sdp": {"masking": [{"until": 2, "masking": "forward"}, {"masking": "backward"}]}},
        'sdp.masking: a schedule is not available with sdp.engine "deepspeed"'),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled: true together with bf16.enabled"),
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
    ("section", "message"), REFUSED, ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else ""
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], message: str) -> None:
    defaults = {"zero_optimization": {"stage": 1}, "sdp": {"engine": "deepspeed", "groups": 2}}
    file = section | {key: value | section.get(key, {}) for key, value in defaults.items()}
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


ZERO_1 = {"zero_optimization": {"stage": 1}, "sdp": {"engine": "deepspeed", "groups": 2}}


def test_what_deepspeed_acts_on_goes_to_it_and_through_a_resolved_file() -> None:
    file = {"gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2, "overlap_comm": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            "flops_profiler": {"enabled": True, "profile_step": 2}, "comms_logger": {"enabled": True}}  # fmt: skip
    own = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "training": {"seed": 3}, "train_batch_size": 8}
    config = load_config({**file, **own, "sdp": {"engine": "deepspeed"}})
    assert {key: config.deepspeed[key] for key in file} == file
    assert config.hints == ()
    again = load_config(config.resolved())
    assert again.resolved() == config.resolved()
    assert again.deepspeed["zero_optimization"] == file["zero_optimization"]
    assert again.deepspeed["comms_logger"] == file["comms_logger"]
    assert None not in again.deepspeed.values()


def test_a_file_without_clipping_is_clipped_as_deepspeed_does() -> None:
    """With several groups too, and by the file that a run keeps; by the other engines it is not."""
    constants = importlib.import_module("deepspeed.runtime.constants")
    file: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, **ZERO_1}
    config = load_config(file)
    assert config.gradient_clipping == config.deepspeed["gradient_clipping"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert config.resolved()["gradient_clipping"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert load_config({**file, "gradient_clipping": 0.0}).gradient_clipping == 0
    assert load_config({**file, "sdp": {"groups": 2}}).gradient_clipping == 0


def test_sub_groups_have_no_effect() -> None:
    """DeepSpeed steps a unit at once: other groups and checkpoints do not know its parts."""
    config = load_config({**ZERO_1, "zero_optimization": {"stage": 3, "sub_group_size": 100}})
    assert config.hints == ("zero_optimization.sub_group_size",)
    assert "sub_group_size" not in config.deepspeed["zero_optimization"]


def _refusals() -> tuple[str, str, str]:
    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        key: value
        for key, value in Case(2, 1, stage=3).config("deepspeed").items()
        if key not in ("optimizer", "scheduler")
    }
    with pytest.raises(ConfigError) as scheduler:
        sdp.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, float),
            config=config,
        )
    with pytest.raises(ConfigError) as refused:
        engine_of(Case(1, 2, stage=1), "deepspeed", optimizer={"type": "Unheard", "params": {"lr": 0.1}})
    with pytest.raises(ConfigError) as replaced:
        stage_2 = config | {"zero_optimization": {"stage": 2}}
        sdp.initialize(model=models.build("mlp"), optimizer=torch.optim.Adagrad, config=stage_2)
    return str(scheduler.value), str(refused.value), str(replaced.value)


def test_what_deepspeed_would_refuse_is_told_in_one_line(ranks: RankPool) -> None:
    for scheduler, refused, replaced in ranks.run(_refusals, world=2):
        assert replaced.startswith("optimizer: under ZeRO, DeepSpeed replaces Adagrad by an optimizer of its own")
        assert scheduler.startswith(
            "lr_scheduler: the LambdaLR given has rates for 1 parameter groups, and DeepSpeed has "
        )
        assert "Unheard" in refused and "\n" not in refused


def _scheduled() -> list[float]:
    """Rates of two parameter groups under a schedule that the script made for them."""
    model = models.build("mlp")
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": others, "lr": 0.05}], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    case = Case(1, 2, stage=2)
    config = case.config("deepspeed", optimizer=None, scheduler=None)
    engine = sdp.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    for step in range(2):
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
    return engine.get_lr()


def test_with_one_group_a_schedule_of_the_script_fits(ranks: RankPool) -> None:
    assert ranks.run(_scheduled, world=2) == [[pytest.approx(0.025), pytest.approx(0.0125)]] * 2


def _without_a_name() -> str:
    from sdp.engine.stores.deepspeed.private import load

    package = load()
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    kept = coordinator.assert_ints_same_as_other_ranks
    del coordinator.assert_ints_same_as_other_ranks
    package.__version__ = "0.99.0"
    try:
        with pytest.raises(ConfigError) as caught:
            engine_of(Case(2, 1, stage=3), "deepspeed")
        return str(caught.value)
    finally:
        coordinator.assert_ints_same_as_other_ranks, package.__version__ = kept, package.version


def test_a_deepspeed_without_a_name_that_is_needed_is_not_supported(ranks: RankPool) -> None:
    for message in ranks.run(_without_a_name, world=2):
        assert message == (
            "DeepSpeed 0.99.0 is not supported (tested: 0.19.8): it has no "
            "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks; install "
            "deepspeed==0.19.8"
        )


# -- half precision --------------------------------------------------------------------------------


def test_fp16_goes_to_deepspeed_and_through_a_resolved_file() -> None:
    config = load_config({"fp16": FP16, **ZERO_1})
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
