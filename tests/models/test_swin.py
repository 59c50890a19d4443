"""Swin: torchvision's names, numerics and initialisation."""

import re
from typing import Any

import pytest
import torch
from sdp.engine.errors import ConfigError, ModelError
from sdp.engine.placement.units import find_units
from sdp.engine.subnetwork.initialisation import plan_initialisation
from sdp.models.registry import build_model
from sdp.models.swin import Swin, SwinBlock, SwinConfig
from torch.utils.flop_counter import FlopCounterMode

UNITS = [f"features.{stage}.{block}" for stage, depth in ((1, 2), (3, 2), (5, 6), (7, 2)) for block in range(depth)]
SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": [1, 2, 4, 6], "depths": [2, 2, 4, 2]}


def from_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of transformers' Swin under torchvision's names."""
    renamed = [
        (r"swin\.embeddings\.patch_embeddings\.projection", "features.0.0"),
        (r"swin\.embeddings\.norm", "features.0.2"),
        (r"swin\.encoder\.layers\.(\d)\.blocks", lambda match: f"features.{2 * int(match[1]) + 1}"),
        (r"swin\.encoder\.layers\.(\d)\.downsample", lambda match: f"features.{2 * int(match[1]) + 2}"),
        (r"attention\.relative_position_bias\.", "attn."),
        (r"attention\.o_proj", "attn.proj"),
        (r"layernorm_before", "norm1"),
        (r"layernorm_after", "norm2"),
        (r"mlp\.fc1", "mlp.0"),
        (r"mlp\.fc2", "mlp.3"),
        (r"swin\.layernorm", "norm"),
        ("^classifier", "head"),
    ]
    ours: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if match := re.search(r"attention\.([qkv])_proj", key):
            if match[1] != "q":
                continue
            value = torch.cat([state[key.replace("q_proj", f"{letter}_proj")] for letter in "qkv"])
            key = key.replace("attention.q_proj", "attn.qkv")
        for pattern, name in renamed:
            key = re.sub(pattern, name, key)
        ours[key] = value
    return ours


@pytest.mark.parametrize("side", [224, 228])  # whole windows, and sides of 57, 29, 15 and 8 patches, which are padded
def test_logits_are_those_of_transformers(side: int) -> None:
    from transformers import SwinConfig as Config
    from transformers import SwinForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SMALL, "num_labels": 7, "image_size": side, "drop_path_rate": 0.0}
    theirs: Any = SwinForImageClassification(Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # theirs begin with biases of zero, which would hide where one goes
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours = Swin(SwinConfig(num_classes=7, **SMALL))
    missing, unexpected = ours.load_state_dict(from_transformers(theirs.state_dict()), strict=False)
    assert not unexpected and all(name.endswith("relative_position_index") for name in missing)
    images, labels = torch.randn(2, 3, side, side), torch.tensor([6, 3])
    with torch.no_grad():
        expected = theirs(images, labels=labels)
        assert expected.logits.std() > 0.1
        torch.testing.assert_close(ours(images), expected.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours(images, labels), expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [224, 228])
def test_units_are_the_residual_blocks_and_state_their_cost(side: int) -> None:
    model = build_model({"name": "swin_t"}, num_classes=10, image_size=side)
    units = find_units(model, "auto")
    assert [unit.name for unit in units] == UNITS
    counted: dict[str, int] = {}
    with FlopCounterMode(display=False) as counter:
        hooks = {name: model.get_submodule(name) for name in UNITS}
        before: dict[str, int] = {}
        for name, module in hooks.items():
            module.register_forward_pre_hook(lambda *_, name=name: before.update({name: counter.get_total_flops()}))
            module.register_forward_hook(
                lambda *_, name=name: counted.update({name: counter.get_total_flops() - before[name]})
            )
        assert model(torch.randn(1, 3, side, side, device="meta")).shape == (1, 10)
    assert counted == {unit.name: unit.flops for unit in units}


def test_initialisation_is_torchvisions() -> None:
    """Matrices and tables have deviation 0.02; indices stay."""
    config = SwinConfig(num_classes=10)
    model, expected = Swin(config), Swin(config)
    for init in plan_initialisation(model, seed=0):
        for name, fill in init.fillers().items():
            tensor = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
            tensor.data.fill_(-77)
            fill(tensor.data[:3], 0)  # as two shards
            fill(tensor.data[3:], 3)
    state = model.state_dict()
    assert not any((value == -77).any() for value in state.values())
    for name in (
        "features.5.3.attn.qkv.weight",
        "features.5.3.attn.relative_position_bias_table",
        "features.2.reduction.weight",
    ):
        assert state[name].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["features.5.3.mlp.0.bias"].eq(0).all() and state["features.5.3.norm2.weight"].eq(1).all()
    assert state["features.0.0.weight"].abs().max().item() == pytest.approx(48**-0.5, rel=0.01)
    name = "features.5.3.attn.relative_position_index"
    assert torch.equal(state[name], expected.state_dict()[name])
    for name in ("head.scale", "features.2.reduction.bias"):
        with pytest.raises(ModelError, match="no parameter or buffer"):
            model.parameter_init(name)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"depths": [2, 2]}, r"model: depths names 2 stages and num_heads 4; give both one number per stage"),
        ({"num_heads": [3, 6, 12, 25]}, r"model: num_heads: 25 heads do not divide the 768 channels of stage 4"),
        ({"stochastic_depth": 1.0}, r"model.stochastic_depth"),
        ({}, r"model.num_classes: not set, and the data does not give it"),
    ],
)
def test_mistakes_are_one_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_model({"name": "swin_t", **section}, num_classes=10 if section else None)
    assert "\n" not in str(error.value)


def test_stochastic_depth_has_the_probabilities_of_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    whole = torchvision.models.swin_t(stochastic_depth_prob=0.2)
    theirs = [part for part in whole.modules() if type(part).__name__ == "SwinTransformerBlock"]
    model = build_model({"name": "swin_t", "stochastic_depth": 0.2}, num_classes=3)
    ours = [part for part in model.modules() if isinstance(part, SwinBlock)]
    assert [1 - block.survival for block in ours] == pytest.approx([block.stochastic_depth.p for block in theirs])
    assert model.random_options() == ["model.stochastic_depth 0.2"]
    assert build_model({"name": "swin_t"}, num_classes=3).random_options() == []


def test_each_branch_is_dropped_for_whole_images_in_training_alone() -> None:
    torch.manual_seed(0)
    block = SwinBlock(8, 2, 4, 0, 4, survival=0.5)
    images = torch.randn(1, 4, 4, 8).repeat(2000, 1, 1, 1)
    attended = images + 2 * block.attn(block.norm1(images))
    both = attended + 2 * block.mlp(block.norm2(attended))
    alone = images + 2 * block.mlp(block.norm2(images))
    found = block.train()(images)
    cases = [(found - case).abs().amax((1, 2, 3)) < 1e-4 for case in (images, attended, alone, both)]
    assert all(0.2 < case.float().mean() < 0.3 for case in cases)
    assert torch.stack(cases).sum(0).eq(1).all()
    plain = SwinBlock(8, 2, 4, 0, 4)
    plain.load_state_dict(block.state_dict())
    assert torch.equal(block.eval()(images), plain.eval()(images))
