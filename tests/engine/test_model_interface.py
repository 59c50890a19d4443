"""Hooks of a model: how the engine reads them, and which misspelt ones it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdp.engine.errors import ModelError
from sdp.engine.model_interface import (
    HOOKS,
    check_hooks,
    get_config,
    get_sharding_groups,
    get_unit_patterns,
    shifts_labels,
)
from torch import nn


class Net(nn.Module):
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
        with pytest.raises(ModelError, match=rf"Net\.{name}: .*did you mean {hook}\? If so, rename it"):
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
