"""The model section of the configuration, and the model sizes that are shipped."""

import json
import re
from importlib import resources

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError
from sdp.engine.placement.layout import Layout
from sdp.models.llama import Llama
from sdp.models.registry import build_model

SECTION = {
    "name": "llama", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def test_builds_on_the_meta_device_with_the_vocabulary_of_the_data():
    model = build_model(SECTION, vocab_size=77)
    assert isinstance(model, Llama)
    assert model.config.vocab_size == 77
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "vocab_size" not in SECTION


def test_an_equal_stated_vocabulary_is_accepted():
    assert build_model(SECTION | {"vocab_size": 77}, vocab_size=77).get_parameter("lm_head.weight").shape[0] == 77


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "lama"}, 'model.name: unknown model "lama", did you mean llama?'),
        ({"name": "gpt2"}, 'model.name: unknown model "gpt2"; known: llama'),
        ({"name": 3}, 'model.name: unknown model "3"; known: llama'),
        ({"hiden_size": 32}, "model.hiden_size: unknown key, did you mean hidden_size?"),
        ({"zzzz": 1}, "model.zzzz: unknown key; known: vocab_size, hidden_size"),
        ({"hidden_size": "32"}, 'model.hidden_size: input should be a valid integer (found "32")'),
        ({"num_hidden_layers": 0}, "model.num_hidden_layers: input should be greater than 0 (found 0)"),
        ({"num_attention_heads": 5}, "model: hidden_size 32 is not divisible by num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "model: num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"head_dim": 7}, "model: head_dim 7 (default: hidden_size / num_attention_heads) is odd"),
        ({"vocab_size": 32000}, "model.vocab_size: 32000, but the data's tokenizer has 77"),
        ({"vocab_size": "77"}, 'model.vocab_size: input should be a valid integer (found "77")'),
    ],
)
def test_bad_sections_are_refused_in_one_line(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_model(SECTION | change, vocab_size=77)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "parameters", "ranks"), [("llama_8b_hybrid", 8_030_261_248, 32), ("llama_70b_hybrid", 70_553_706_496, 128)]
)
def test_shipped_sizes_on_three_dimensions(name, parameters, ranks):
    """LLaMA 3's sizes on README's ranks: the state fits into 80 GB."""
    file = resources.files("sdp.configs") / f"{name}.json"
    config = load_config(json.loads(file.read_text(encoding="utf-8")))
    model = build_model(config.model, vocab_size=128256)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == config.training.steps
    mesh = Mesh.for_world(ranks, config.sdp.groups, config.tensor_parallel.autotp_size)
    assert min(mesh.sdp, mesh.fsdp, mesh.tp) > 1
    layout = Layout.of(model, config, mesh)
    for group in range(mesh.sdp):
        held = sum(info.shard_numel(mesh.fsdp, 0) for info in layout.held(group))
        assert held < 0.6 * parameters / (mesh.fsdp * mesh.tp)
        assert 16 * held < 30e9  # bytes: float32 weights, gradients and AdamW's two moments


@pytest.mark.parametrize("key", ["name", "hidden_size"])
def test_required_keys(key):
    with pytest.raises(ConfigError, match=rf"model\.{key}: this key is required"):
        build_model({k: v for k, v in SECTION.items() if k != key}, vocab_size=77)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama_134m", 134_042_240), ("llama_500m", 501_810_176), ("llama_1b", 1_003_554_816)]
)
def test_shipped_sizes(name, parameters):
    file = resources.files("sdp.configs") / f"{name}.json"
    config = load_config(json.loads(file.read_text(encoding="utf-8")))
    model = build_model(config.model, vocab_size=32000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert (config.sdp.groups, config.sdp.capacity, config.sdp.masking) == (8, 0.5, "forward")
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == config.training.steps


@pytest.mark.parametrize(("name", "parameters"), [("resnet18_cifar10", 11_173_962), ("swin_t_imagenet", 28_288_354)])
def test_shipped_image_models(name, parameters):
    file = resources.files("sdp.configs") / f"{name}.json"
    config = load_config(json.loads(file.read_text(encoding="utf-8")))
    model = build_model(
        config.model, num_classes=10 if "cifar" in name else 1000, image_size=32 if "cifar" in name else 224
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == config.training.steps
    placement = Layout.of(model, config, Mesh(config.sdp.groups)).placement
    assert placement.connected and placement.imbalance < (1.01 if config.sdp.placement == "balanced" else 2)
