"""Finding units, and refusing what cannot be one."""

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError, ModelError, PlacementError
from sdp.engine.module_paths import resolve_name
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import find_units
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from torch import nn


def names(model: nn.Module, patterns: object = "auto", explicit: object = None) -> list[str]:
    return [unit.name for unit in find_units(model, patterns, explicit)]  # type: ignore[arg-type]


class Two(nn.Module):
    """Two stacks; the second is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(models.Block() for _ in range(2))})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(models.Block() for _ in range(3))})


def test_auto_takes_every_stack_of_one_class() -> None:
    assert names(models.mlp()) == [f"layers.{index}" for index in range(4)]
    encoder, decoder = ([f"{half}.layers.{i}" for i in range(n)] for half, n in (("encoder", 2), ("decoder", 3)))
    assert names(Two()) == encoder + decoder
    mixed = nn.Sequential(
        nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Sequential(models.Block(), models.Block())
    )
    assert names(mixed) == ["4.0", "4.1"]
    with pytest.raises(
        ModelError, match=r'sdp.units: "auto" finds no ModuleList or Sequential with two or more neighbours'
    ):
        names(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "masking", "first", "last"),
    [
        ("llama-meta", "backward", "model.embed_tokens", "lm_head"),
        ("llama-tied-meta", "backward", "model.embed_tokens", "model.layers.3"),
        ("mlp", "backward", "stem", "head"),
        ("llama-meta", "forward", "model.layers.0", "model.layers.3"),
    ],
)
def test_contiguous_adds_embedding_and_head(model: str, masking: str, first: str, last: str) -> None:
    config = load_config({"sdp": {"groups": 2, "capacity": 0.5, "placement": "contiguous", "masking": masking}})
    layout = Layout.of(models.build(model), config, Mesh(2))
    assert [layout.units[0].name, layout.units[-1].name] == [first, last]
    assert [unit.index for unit in layout.units] == [*range(len(layout.units))]
    assert not {"model.embed_tokens", "lm_head", "stem", "head"} & set(layout.blocks)
    assert layout.parameters[layout.units[0].slices[0].parameter].unit == first


def test_no_units_for_several_groups_is_an_error() -> None:
    config = Case(2, 1).config("fsdp2")
    config["sdp"] |= {"units": [], "placement": "cyclic"}
    with pytest.raises(ConfigError, match=r"sdp\.units"):
        Layout.of(models.Mlp(), load_config(config), Mesh(2))


def test_auto_takes_blocks_not_layers() -> None:
    """Plain layers in a row are not residual blocks, however many they are."""
    perceptron = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))
    assert names(nn.ModuleDict({"head": perceptron, "blocks": nn.ModuleList(models.Block() for _ in range(3))})) == [
        f"blocks.{index}" for index in range(3)
    ]
    with pytest.raises(ModelError, match='"auto" finds no'):
        names(perceptron)
    around = nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3), *(models.Block() for _ in range(4)), nn.LayerNorm(3), models.Block()
    )
    assert names(around) == ["2", "3", "4", "5"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert names(encoder) == [f"layers.{index}" for index in range(3)]


def test_a_model_may_state_its_units() -> None:
    assert names(models.llama(tied=True)) == [f"model.layers.{index}" for index in range(4)]


def test_patterns() -> None:
    assert names(Two(), ["*.layers.*"]) == [f"encoder.layers.{i}" for i in range(2)] + [
        f"decoder.layers.{i}" for i in range(3)
    ]
    assert names(Two(), ["decoder.layers.[02]", "encoder.layers.1"]) == [
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.2",
    ]
    assert names(models.mlp(12), ["layers.*"])[-2:] == ["layers.10", "layers.11"]
    with pytest.raises(ModelError, match=r"sdp.units: 'layer.\*' matches no module of the model"):
        names(models.mlp(), ["layers.*", "layer.*"])


def test_a_refusal_names_all_offenders() -> None:
    with pytest.raises(ModelError, match=r"these patterns match no module of the model: 'a\.\*', 'b\.\*'$"):
        names(models.mlp(), ["a.*", "layers.*", "b.*"])
    both = "'layers.0.up' lies inside the unit 'layers.0', 'layers.1.up' lies inside the unit 'layers.1'"
    with pytest.raises(ModelError, match=f"{both}; units must not nest"):
        names(models.mlp(), ["layers.*", "layers.[01].up"])
    tied = models.mlp()
    for index in (2, 3):
        tied.get_submodule(f"layers.{index}.up").weight = tied.get_parameter("layers.0.up.weight")
    pairs = [f"layers.{index}: its parameter 'layers.0.up.weight' is tied to 'layers.0'" for index in (2, 3)]
    with pytest.raises(ModelError, match=f"^{'; '.join(pairs)}; a tied weight cannot be in a unit"):
        names(tied)
    leaving = models.mlp()
    leaving.copies = nn.ModuleList(nn.Linear(models.HIDDEN, models.WIDTH) for _ in range(2))
    for index in range(2):
        leaving.copies[index].weight = leaving.get_parameter(f"layers.{index}.down.weight")
    with pytest.raises(ModelError, match=r"^layers\.0: .* outside the unit; layers\.1: .* outside the unit; leave"):
        names(leaving)


def test_explicit_names_and_endings() -> None:
    assert names(models.llama(tied=False), "auto", ["layers.3", "model.layers.0"]) == [
        "model.layers.0",
        "model.layers.3",
    ]
    assert resolve_name("layers.1", ["a.layers.1", "b.xlayers.1"]) == "a.layers.1"
    with pytest.raises(
        PlacementError, match=r"'layers.1' could be 'encoder.layers.1' or 'decoder.layers.1'; write the whole path"
    ):
        names(Two(), "auto", ["layers.1"])
    with pytest.raises(
        PlacementError, match=r"sdp.placement: 'layers.9' is not a module of the model, did you mean layers\.\d\?"
    ):
        names(models.mlp(), "auto", ["layers.9"])


def test_tied_weights_cannot_lie_in_units() -> None:
    same_block = models.mlp()
    same_block.layers[2] = same_block.layers[1]
    with pytest.raises(ModelError, match=r"layers.1 and layers.2 are one module, and a unit has only one place"):
        names(same_block)
    earlier = nn.Module()
    earlier.first = nn.Linear(models.WIDTH, models.HIDDEN)
    earlier.layers = nn.ModuleList(models.Block() for _ in range(2))
    earlier.layers[1].up.weight = earlier.first.weight  # type: ignore[union-attr,index]
    with pytest.raises(ModelError, match=r"layers.1: its parameter 'first.weight' is tied to 'first.weight'"):
        names(earlier)


def test_tied_inside_one_unit_is_fine() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)))
    for block in model:
        block[1].weight = block[0].weight  # type: ignore[index]
    units = find_units(model, "auto")
    assert [unit.numel for unit in units] == [15, 15]
    assert torch.equal(model[0][0].weight, model[0][1].weight)  # type: ignore[index]
