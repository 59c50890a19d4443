"""ResNet-18: torchvision's names, numerics and initialisation."""

import re
from typing import Any

import pytest
import torch
from sdp.engine.errors import ConfigError, ModelError
from sdp.engine.placement.units import find_units
from sdp.engine.subnetwork.initialisation import plan_initialisation
from sdp.models.registry import build_model
from sdp.models.resnet import BasicBlock, ResNet, ResNetConfig

UNITS = ["layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"]


def from_transformers(key: str) -> str:
    """torchvision's name of a tensor of transformers' ``ResNetForImageClassification``."""
    renamed = [
        (r"resnet\.embedder\.embedder\.", ""),
        (r"resnet\.encoder\.stages\.(\d)\.layers\.", lambda match: f"layer{int(match[1]) + 1}."),
        (r"shortcut\.convolution", "downsample.0"),
        (r"shortcut\.normalization", "downsample.1"),
        (r"layer\.(\d)\.convolution", lambda match: f"conv{int(match[1]) + 1}"),
        (r"layer\.(\d)\.normalization", lambda match: f"bn{int(match[1]) + 1}"),
        ("^convolution", "conv1"),
        ("^normalization", "bn1"),
        (r"classifier\.1", "fc"),
    ]
    for pattern, name in renamed:
        key = re.sub(pattern, name, key)
    return key


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    """An independent ResNet-18, with other running statistics than those of a new model."""
    from transformers import ResNetConfig as Config
    from transformers import ResNetForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic",
        "num_labels": 7,
    }  # fmt: skip
    model = ResNetForImageClassification(Config(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_those_of_transformers(theirs, training):
    ours = ResNet(ResNetConfig(num_classes=7))
    ours.load_state_dict({from_transformers(key): value for key, value in theirs.state_dict().items()})
    ours.train(training)
    theirs.train(training)
    images, labels = torch.randn(3, 3, 70, 66), torch.tensor([0, 6, 3])
    with torch.no_grad():
        expected = theirs(images, labels=labels)
        torch.testing.assert_close(ours(images), expected.logits, rtol=1e-5, atol=1e-5)
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(ours.get_buffer(from_transformers(name)), buffer, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(ours(images, labels), expected.loss, rtol=1e-5, atol=1e-5)


def test_statistics_stay_float32_where_weights_are_bfloat16():
    model: Any = ResNet(ResNetConfig(num_classes=7, stem="cifar", width=8))
    images, cast = torch.randn(4, 3, 32, 32), {name: weight.bfloat16() for name, weight in model.named_parameters()}
    with torch.no_grad():
        expected = model.eval()(images)
        ours = torch.func.functional_call(model, cast, (images.bfloat16(),))
        torch.testing.assert_close(ours.float(), expected, rtol=0.05, atol=0.05)
        torch.func.functional_call(model.train(), cast, (images.bfloat16(),))
    assert model.layer4[1].bn2.running_mean.dtype == torch.float32
    assert not model.layer4[1].bn2.running_mean.eq(0).any()


def test_units_are_the_blocks_that_keep_their_shape():
    model = build_model({"name": "resnet18", "stem": "cifar"}, num_classes=10, image_size=32)
    units = find_units(model, "auto")
    assert [unit.name for unit in units] == UNITS
    images = torch.randn(2, 3, 32, 32, device="meta")
    shapes: dict[str, Any] = {}
    for name in UNITS:
        model.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: shapes.update({name: (args[0].shape, out.shape)})
        )
    assert model(images).shape == (2, 10)
    for unit in units:
        before, after = shapes[unit.name]
        assert before == after
        weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith(f"{unit.name}.conv"))
        assert unit.flops == 2 * weights * after[2:].numel()


@pytest.mark.parametrize(("size", "stem", "side"), [(224, "imagenet", 56), (70, "imagenet", 18), (8, "cifar", 8)])
def test_flops_follow_the_size_of_the_images(size, stem, side):
    model: Any = build_model({"name": "resnet18", "stem": stem, "width": 4}, num_classes=10, image_size=size)
    flops = model.unit_flops()
    assert list(flops) == UNITS
    assert flops["layer1.0"] == flops["layer1.1"] == 2 * 2 * 9 * 4 * 4 * side**2


def test_initialisation_is_torchvisions():
    """Convolutions have variance 2 / fan-out, the classifier is uniform."""
    model = ResNet(ResNetConfig(num_classes=10))
    for init in plan_initialisation(model, seed=0):
        for name, fill in init.fillers().items():
            tensor = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
            tensor.data.fill_(77)
            fill(tensor.data, 0)
    state = model.state_dict()
    assert not any((value == 77).all() for value in state.values())
    assert state["conv1.weight"].std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.03)
    assert state["layer4.1.conv2.weight"].std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    bound = 512**-0.5
    assert state["fc.weight"].abs().max().item() == pytest.approx(bound, rel=0.01)
    assert state["fc.weight"].std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert state["layer2.0.downsample.1.running_var"].eq(1).all()
    with pytest.raises(ModelError, match="no parameter or buffer"):
        model.parameter_init("fc.scale")


@pytest.mark.parametrize(
    ("section", "data", "message"),
    [
        ({"stem": "cifr"}, {"num_classes": 10}, "model.stem: input should be 'cifar' or 'imagenet'"),
        ({"num_classes": 100}, {"num_classes": 10},
            "model.num_classes: 100, but the data has 10; remove model.num_classes"),
        ({"image_size": 32}, {"image_size": 8}, "model.image_size: 32, but the data's images have sides of 8"),
        ({}, {}, "model.num_classes: not set, and the data does not give it"),
        ({}, {"vocab_size": 77}, "model.name: resnet18 reads images, but the data section describes tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(section, data, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as error:
        build_model({"name": "resnet18", **section}, **data)
    assert "\n" not in str(error.value)


def test_one_value_a_channel_is_refused_in_training() -> None:
    model = ResNet(ResNetConfig(num_classes=10, stem="cifar", width=8, image_size=8))
    with pytest.raises(ModelError, match=r"has one; raise train_micro_batch_size_per_gpu"):
        model(torch.zeros(1, 3, 8, 8))
    assert model.eval()(torch.zeros(1, 3, 8, 8)).shape == (1, 10)


def test_stochastic_depth_skips_images_more_often_the_deeper_the_block() -> None:
    model = ResNet(ResNetConfig(num_classes=3, width=4, stem="cifar", stochastic_depth=0.8))
    blocks = [block for block in model.modules() if isinstance(block, BasicBlock)]
    assert [block.survival for block in blocks] == pytest.approx([1 - 0.1 * number for number in range(1, 9)])
    assert model.random_options() == ["model.stochastic_depth 0.8"]
    assert ResNet(ResNetConfig(num_classes=3)).random_options() == []


def test_dropout_is_between_the_convolutions_and_only_in_training() -> None:
    model = ResNet(ResNetConfig(num_classes=3, width=4, stem="cifar", dropout=0.25, stochastic_depth=0.5))
    assert all(block.dropout == 0.25 for block in model.modules() if isinstance(block, BasicBlock))
    assert model.random_options() == ["model.dropout 0.25", "model.stochastic_depth 0.5"]
    block = BasicBlock(4, 4, 1, dropout=0.25)
    for norm in (block.bn1, block.bn2):
        norm.eval()
    seen: list[torch.Tensor] = []
    block.conv2.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = torch.rand(500, 4, 8, 8)
    block(images)
    hidden = torch.relu(block.bn1(block.conv1(images)))
    kept = seen[0] != 0
    torch.testing.assert_close(seen[0][kept], hidden[kept] / 0.75)
    assert 0.7 < kept[hidden > 0].float().mean() < 0.8
    block.eval()(images)
    torch.testing.assert_close(seen[1], hidden)


def test_an_image_that_skips_a_block_is_unchanged_and_the_others_get_more() -> None:
    torch.manual_seed(0)
    block = BasicBlock(4, 4, 1, survival=0.25)
    for norm in (block.bn1, block.bn2):
        norm.eval()
    images = torch.rand(1, 4, 3, 3).repeat(2000, 1, 1, 1)
    added = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(images)))))
    found = block(images)
    stays = (found == images).flatten(1).all(1)
    assert 0.7 < stays.float().mean() < 0.8
    torch.testing.assert_close(found[~stays], torch.relu(images + 4 * added)[~stays])
    torch.testing.assert_close(block.eval()(images), torch.relu(images + added))
