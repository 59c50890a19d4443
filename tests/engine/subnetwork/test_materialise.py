"""Materialising a group's part of a model: what is allocated, its values, its ties and its
dtype.
"""

from __future__ import annotations

import torch
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import Config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.tensor_info import Shard
from sdp.engine.subnetwork.initialisation import plan_initialisation
from sdp.engine.subnetwork.materialise import allocate, cut, give_values
from sdp.models.llama import Llama, LlamaConfig
from torch import nn

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
}  # fmt: skip


def llama_on_meta(**more: object) -> nn.Module:
    with torch.device("meta"):
        return Llama(LlamaConfig(**SHAPE, **more))  # type: ignore[arg-type]


def config_of(**sdp: object) -> Config:
    return load_config({"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 2, "capacity": 0.5, **sdp}})


def materialised(group: int, config: Config, **more: object) -> dict[str, torch.Tensor]:
    """The parameters of a group's part, with values."""
    model = llama_on_meta(**more)
    layout = Layout.of(model, config, Mesh(2))
    plan = plan_initialisation(model, 3)
    cut(model, config, layout, group, torch.float32)
    give_values(model, layout, plan, CPU, Shard())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def full(**more: object) -> dict[str, torch.Tensor]:
    model = llama_on_meta(**more)
    layout = Layout.of(model, load_config({"train_micro_batch_size_per_gpu": 1}), Mesh(1))
    give_values(model, layout, plan_initialisation(model, 3), CPU, Shard())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_group_has_the_blocks_that_it_holds_with_the_values_of_the_full_model() -> None:
    config, whole = config_of(), full()
    layout = Layout.of(llama_on_meta(), config, Mesh(2))
    parts = [materialised(group, config) for group in range(2)]
    for group, part in enumerate(parts):
        assert set(part) == {info.name for info in layout.held(group)}
        assert len(part) < len(whole)
        for name, value in part.items():
            assert torch.equal(value, whole[name]), name
    assert set(parts[0]) | set(parts[1]) == set(whole)


def test_a_group_has_the_neurons_that_it_holds_with_the_values_of_the_full_model() -> None:
    config, whole = config_of(granularity="neuron", neuron_groups=2), full()
    layout = Layout.of(llama_on_meta(), config, Mesh(2))
    part = materialised(1, config)
    sliced = [layout.parameters[name] for name in part if layout.parameters[name].cut is not None]
    assert {info.cut.dim for info in sliced if info.cut} == {0, 1}
    for info in sliced:
        assert info.cut is not None
        size = info.shape[info.cut.dim]
        assert torch.equal(part[info.name], whole[info.canonical].narrow(info.cut.dim, info.cut.start, size))


def test_allocating_restores_ties() -> None:
    model = llama_on_meta(tie_word_embeddings=True)
    layout = Layout.of(model, load_config({"train_micro_batch_size_per_gpu": 1}), Mesh(1))
    allocate(model, layout, CPU)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_frozen_copies_get_no_values() -> None:
    model, whole = llama_on_meta(), full()
    layout = Layout.of(model, load_config({"train_micro_batch_size_per_gpu": 1}), Mesh(1))
    frozen = "model.embed_tokens.weight"
    give_values(model, layout, plan_initialisation(model, 3), CPU, Shard(), frozen={frozen})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[name]) == (name != frozen)
