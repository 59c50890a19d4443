"""Hooks of a model: how the engine reads them, and which misspelt ones it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdp.engine.errors import ModelError
from sdp.engine.model_interface import (
    HOOKS,
    Constant,
    check_hooks,
    get_canonical_name,
    get_config,
    get_flops_per_token,
    get_neuron_branches,
    get_parameter_init,
    get_random_options,
    get_sharding_groups,
    get_tensor_parallel_plan,
    get_unit_flops,
    get_unit_patterns,
    shifts_labels,
)
from sdp.models.registry import build_model
from torch import nn

LLAMA = {
    "name": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


class Net(nn.Module):
    """A user's model without any hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).mean()


def net_with(name: str, value: Any) -> nn.Module:
    return type("Net", (Net,), {name: value})()


def method(self: nn.Module) -> list[str]:
    return ["layers.*"]


def test_the_hooks_are_the_methods_of_the_protocol() -> None:
    assert set(HOOKS) == {
        "unit_patterns", "unit_flops", "neuron_branches", "tensor_parallel_plan", "parameter_init", "canonical_name",
        "sharding_groups", "random_options", "flops_per_token",
    }  # fmt: skip


def test_a_model_without_hooks_has_defaults() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for read in (
        get_unit_patterns, get_neuron_branches, get_tensor_parallel_plan, get_parameter_init, get_flops_per_token,
        get_config,
    ):  # fmt: skip
        assert read(model) is None
    assert get_unit_flops(model) == {} and get_sharding_groups(model) == [] and get_random_options(model) == []
    assert get_canonical_name(model)("a.weight") == "a.weight"


def test_hooks_of_llama_are_read() -> None:
    model = build_model(LLAMA)
    init, flops, plan = get_parameter_init(model), get_flops_per_token(model), get_tensor_parallel_plan(model)
    assert get_unit_patterns(model) == ["model.layers.*"]
    assert init is not None and init("model.norm.weight") == Constant(1.0)
    assert flops is not None and set(flops(8)) == {"model.layers.0", "model.layers.1", "shared"}
    assert plan is not None and "lm_head" in plan
    assert len(get_neuron_branches(model) or []) == 4
    assert get_canonical_name(model)("norm.weight") == "model.norm.weight"


def test_a_hook_may_be_set_on_the_model() -> None:
    model: Any = Net()
    model.sharding_groups = lambda: ["head"]
    check_hooks(model)
    assert get_sharding_groups(model) == ["head"]


@pytest.mark.parametrize("value", [["layers.*"], nn.Linear(2, 2)])
def test_a_hook_that_is_not_a_method_is_refused(value: Any) -> None:
    model: Any = Net()
    model.unit_patterns = value
    with pytest.raises(ModelError, match=r"Net\.unit_patterns: must be a method, but is of type (list|Linear);"):
        get_unit_patterns(model)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_misspelt_hook_is_refused(hook: str) -> None:
    swapped = hook[:3] + hook[4] + hook[3] + hook[5:]
    for name in (hook[:-1], hook + "s", hook.replace("_", "", 1), swapped):
        with pytest.raises(ModelError, match=rf"Net\.{name}: .*did you mean {hook}\? Rename it"):
            check_hooks(net_with(name, method))


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property])
def test_a_misspelt_hook_is_found_whatever_kind_of_method_it_is(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match="did you mean unit_patterns"):
        check_hooks(net_with("unit_pattern", wrap(method)))


def test_a_helper_next_to_the_hook_is_not_refused() -> None:
    model = type("Net", (Net,), {"neuron_branches": method, "neuron_branch": method})()
    check_hooks(model)


@pytest.mark.parametrize(
    "name", ["num_flops_per_token", "get_unit_flops", "flops_per_step", "_unit_pattern", "tp_plan", "init", "pattern"]
)
def test_other_names_are_not_refused(name: str) -> None:
    check_hooks(net_with(name, method))


def test_data_with_a_similar_name_is_not_refused() -> None:
    check_hooks(net_with("unit_pattern", "layers.*"))
    model: Any = Net()
    model.unit_pattern = ["layers.*"]
    model.sharding_group = nn.Linear(2, 2)
    check_hooks(model)


@pytest.mark.parametrize(
    "section",
    [
        LLAMA,
        {"name": "resnet18", "num_classes": 10},
        {"name": "swin_t", "num_classes": 10, "image_size": 32},
    ],
    ids=lambda section: section["name"],
)
def test_our_models_pass(section: dict[str, Any]) -> None:
    check_hooks(build_model(section))


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_models_of_transformers_pass(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, kind).config_class())
        own = type("Own", (type(model),), {"__module__": "train"})(model.config)
    check_hooks(model)
    check_hooks(own)
    assert shifts_labels(model) is (kind != "BertForMaskedLM")
    assert get_config(model) is model.config
