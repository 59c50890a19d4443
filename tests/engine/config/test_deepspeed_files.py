"""What a file for DeepSpeed may have: "auto" values, old spellings, comments."""

import io
import json
from pathlib import Path
from typing import Any

import hjson
import pytest
import sdp
from sdp.engine.config.deepspeed_keys import KEPT_FROM_DEEPSPEED, REFUSED
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.initialize import announce_hints
from sdp.tests.support.models import mlp

TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 1e5,
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
def test_auto_means_the_default_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(TRAINER)
    assert (config.gradient_clipping, config.precision, config.train_micro_batch_size_per_gpu) == (0.0, "float32", None)
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params == config.scheduler.params == {}
    assert {"bf16.enabled", "optimizer.params.betas", "gradient_clipping"} < set(config.autos)
    assert load_config({"sdp": {"units": "auto"}}).autos == (), "our own sections have an auto of their own"
    with pytest.raises(ConfigError, match="gradient_clippin: unknown key, did you mean gradient_clipping"):
        load_config({"gradient_clippin": "auto"})
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        "prescale_gradients": True,
    }
    with caplog.at_level("INFO", logger="sdp"):
        engine = sdp.initialize(model=mlp(), config=settings)[0]
    assert (engine.train_micro_batch_size_per_gpu(), engine.get_lr()) == (1, [0.001])
    keys = "train_micro_batch_size_per_gpu, optimizer.params.lr"
    assert f'"auto" means the default of each key here: {keys}' in caplog.messages
    assert "accepted without effect (performance hints for DeepSpeed): prescale_gradients" in caplog.messages


HJSON = """// a comment
{
  "train_batch_size": 8,  # another
  /* and
     one more */
  zero_optimization: {
    stage: 2
    "overlap_comm": true,
  },
  "steps_per_print": inf
}
"""


def test_hjson_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HJSON)
    config = load_config(path)
    theirs = hjson.load(io.StringIO(HJSON))
    assert config.train_batch_size == theirs["train_batch_size"] == 8
    assert config.zero_optimization.stage == theirs["zero_optimization"]["stage"] == 2
    assert config.steps_per_print > 10**9 and theirs["steps_per_print"] == "inf"
    path.write_text('{"train_batch_size": 8, # twice\n "train_batch_size": 4}')
    with pytest.raises(ConfigError, match=r"ds.json:1:\d+: not valid JSON"):
        load_config(path)


@pytest.mark.parametrize(
    "section",
    [
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        {"amp": {"enabled": False, "opt_level": "O2"}},
        {"autotuning": {"enabled": False, "fast": True}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 10}},
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 512}},
        {"curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}},
        {"quantize_training": {"enabled": False, "quantize_groups": 1}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"sparse_gradients": False},
        {"managed_gradient_accumulation": True, "dataloader_drop_last": True,
            "data_types": {"keep_in_fp32_modules": "auto"}},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": True, "save_muon_momentum_buffer_in_memory": False}},
        {"sparse_gradients": True, "sparse_attention": {"mode": "fixed", "block": 16}, "fp32_allreduce": True},
        {"checkpoint": {"parallel_write": {"pipeline_stage": True}, "writer": {"type": "fast"}}},
        {"zero_optimization": {"stage": 2,
            "offload_optimizer": {"device": "CPU", "buffer_count": 4, "fast_init": False}}},
        {"fp16": {"enabled": False, "initial_scale_power": 16.0, "loss_scale_window": 1e3}},
        {"fp16": {"enabled": False, "opt_level": "O2", "min_loss_scale": 0.5}},
        {"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
        {"bfloat16": {"enabled": True}},
        {"optimizer": {"type": "adam", "adam_w_mode": True, "params": {"lr": 0.1}}},
        {"zero_optimization": {"stage": 2, "find_unused_parameters": True, "cpu_offload": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}},
        {"zero_optimization": True},
        {"checkpoint": {"tag_validation": "WARN"}},
        {"bf16": {"enable": False}, "fp16": {"enable": False, "fp16_scale_tolerance": 0.25, "fp16_opt_level": "O2"}},
        {"data_efficiency": {"enabled": True, "seed": 7, "data_routing": {"enabled": True,
            "random_ltd": {"enabled": True, "total_layer_num": 4}}}},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": False,
            "curriculum_learning": {"enabled": True}}}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}},
        {"overlap_comm": True, "max_grad_norm": 1.0, "log": {"steps_per_print": 50}},
        {"comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}}},
        {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True,
            "number_checkpoints": 4}},
        {"tensorboard": None, "gradient_accumulation_dtype": "fp32", "_comment": "ours", "comment": "too"},
    ],
    ids=lambda section: next(iter(section)),
)  # fmt: skip
def test_neutral_and_old_settings_are_accepted(section: dict[str, Any]) -> None:
    """Both engines accept them, and DeepSpeed itself accepts what it gets of them."""
    load_config({"train_batch_size": 4, **section})
    zero = section.get("zero_optimization", {})
    zero = {"stage": 1, **zero} if isinstance(zero, dict) else zero
    config = load_config({"train_batch_size": 4, **section, "zero_optimization": zero, "sdp": {"engine": "deepspeed"}})
    handed = config.deepspeed
    assert not set(handed) & KEPT_FROM_DEEPSPEED
    fp16 = handed.get("fp16", {})
    fp16.pop("min_loss_scale", None)  # DeepSpeed allows integers alone
    theirs = pytest.importorskip("deepspeed.runtime.config")
    theirs.DeepSpeedConfig({"train_batch_size": 4, **handed, "train_micro_batch_size_per_gpu": 4})
    assert load_config(config.resolved()).resolved() == config.resolved()


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_the_log_says_why_a_section_has_no_effect(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {
        "train_batch_size": 4,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "max_grad_norm": 1.0,
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}},
        "zero_optimization": {"stage": 1},
        "sdp": {"engine": engine},
    }
    with caplog.at_level("INFO", logger="sdp"):
        announce_hints(load_config(settings))
    levels = {record.getMessage().partition(" has no effect: ")[0]: record.levelname for record in caplog.records}
    assert levels == {
        "offload_optimizer": "WARNING",
        "overlap_comm": "WARNING",
        "max_grad_norm": "WARNING",
        "data_efficiency": "INFO",
    }
    assert "move it into zero_optimization. Until then nothing is offloaded" in caplog.text
    assert "convert_to_random_ltd" in caplog.text


def test_every_refused_value_has_a_reason() -> None:
    for path, (_, reason) in REFUSED.items():
        *parents, key = path.split(".")
        raw: Any = {key: True if key == "enabled" else "no such value"}
        for parent in reversed(parents):
            raw = {parent: raw}
        with pytest.raises(ConfigError) as caught:
            load_config(raw)
        assert str(caught.value).startswith(f"{path}: ")
        assert reason in str(caught.value)


UNDER_DEEPSPEED: dict[str, Any] = {"zero_optimization": {"stage": 1}, "sdp": {"engine": "deepspeed"}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quantize_training": {"quantize_groups": 16}}, 'quantize_training: {"quantize_groups": 16} cannot be '),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: 2 cannot be honoured by this engine: there is no "),
        ({"num-layers": 2}, "num-layers: this is a key of GPT-NeoX"),
        ({"curriculum_learning": {"enabled": "PLACEHOLDER"}},
            'curriculum_learning.enabled: input should be a valid boolean (found "PLACEHOLDER")'),
        ({"bf16": {"enable": True}}, "bf16.enable: true cannot be honoured by this engine: the key's name is enabled"),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True,
                "curriculum_learning": {"enabled": True}}}, **UNDER_DEEPSPEED},
            "data_efficiency.data_sampling.curriculum_learning.enabled: true cannot be honoured",
        ),
        ({"optimizer": {"type": "Adam", "adam_w_mode": False}}, "optimizer.adam_w_mode: false cannot be honoured"),
        ({"hybrid_engine": {"enabled": True}, **UNDER_DEEPSPEED}, 'hybrid_engine: {"enabled": true} cannot be '),
        ({"torch_autocast": {"enabled": True}, **UNDER_DEEPSPEED}, "torch_autocast.enabled: true cannot be "),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_deepspeed_at_stage_0_is_fsdp2(caplog: pytest.LogCaptureFixture, one_rank: None) -> None:
    """As in DeepSpeed, gradients are clipped at 1 if the file does not say."""
    file = {"train_batch_size": 2, "comms_logger": {"enabled": True}, "sdp": {"engine": "deepspeed"}}
    config = load_config(file)
    assert (config.sdp.engine, config.gradient_clipping, config.hints) == ("fsdp2", 1.0, ("comms_logger",))
    assert not config.deepspeed
    assert load_config(config.resolved()).resolved() == config.resolved()
    with caplog.at_level("INFO", logger="sdp"):
        sdp.initialize(model=mlp(), config=config)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("sdp.engine")]
    assert lines == ['sdp.engine: "fsdp2" runs in place of "deepspeed", which has nothing to shard at stage 0']
    with pytest.raises(ConfigError, match=r"^comet.enabled: true cannot be honoured by this engine"):
        load_config({**file, "comet": {"enabled": True}})
