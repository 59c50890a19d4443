"""``"units": "auto"`` on models that nobody wrote for SDP."""

import pytest
import torch
from sdp.engine.placement.units import CHANGES_SHAPE, MAKES_A_TABLE, find_units, find_unskippable
from sdp.tests.support import models
from sdp.tests.support.foreign import foreign_models
from torch import nn


def chain(path: str, blocks: int) -> list[str]:
    return [f"{path}.{index}" for index in range(blocks)]


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model, "auto")]


UNITS = {
    "llama": chain("model.layers", 3),
    "gpt2": chain("transformer.h", 3),
    "bert": chain("bert.encoder.layer", 3),
    "vit": chain("vit.layers", 3),
    "t5": chain("encoder.block", 3) + chain("decoder.block", 3),
    "whisper": chain("model.encoder.layers", 2) + chain("model.decoder.layers", 2),
    "swin": chain("swin.encoder.layers.0.blocks", 2) + chain("swin.encoder.layers.1.blocks", 2),
    "resnet": chain("resnet.encoder.stages.0.layers", 2) + chain("resnet.encoder.stages.1.layers", 3),
    "torchvision-resnet": [name for stage in range(1, 5) for name in chain(f"layer{stage}", 2)],
}
UNSKIPPABLE = {
    "t5": {"encoder.block.0": MAKES_A_TABLE, "decoder.block.0": MAKES_A_TABLE},
    "resnet": {"resnet.encoder.stages.1.layers.0": CHANGES_SHAPE},
    "torchvision-resnet": {f"layer{stage}.0": CHANGES_SHAPE for stage in (2, 3, 4)},
}


@pytest.mark.parametrize("kind", UNITS)
def test_units_of_foreign_models(kind: str) -> None:
    model = foreign_models.build(kind)
    assert names(model) == UNITS[kind]
    assert find_unskippable(model, UNITS[kind]) == UNSKIPPABLE.get(kind, {})


class Stage(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(blocks))
        self.down = nn.Linear(2, 2)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_containers() -> None:
    in_dict = nn.ModuleDict({"layers": nn.ModuleDict({key: models.Block() for key in ("a", "b", "c")})})
    assert names(in_dict) == ["layers.a", "layers.b", "layers.c"]
    lists = nn.ModuleDict({key: nn.ModuleList(models.Block() for _ in range(2)) for key in ("left", "right")})
    assert names(lists) == chain("left", 2) + chain("right", 2)


def test_stages_give_way_to_their_blocks() -> None:
    for depths in ((1, 3), (1, 1), (2, 1, 2)):
        stages = nn.ModuleList(Stage(depth) for depth in depths)
        assert names(stages) == [name for index, depth in enumerate(depths) for name in chain(f"{index}.blocks", depth)]


def test_experts_and_parts_of_a_block_do_not_count() -> None:
    assert names(models.Experts(3)) == chain("layers", 3)
    wide = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(3), "all": nn.ModuleList([Bare()] * 1)}) for _ in range(2))
    wide.extra = nn.Sequential(*(models.Block() for _ in range(2)))
    assert names(wide) == chain("extra", 2)


def test_blocks_without_a_norm() -> None:
    two = nn.ModuleDict({key: nn.ModuleList(Bare() for _ in range(n)) for key, n in (("left", 2), ("right", 3))})
    assert names(two) == chain("left", 2) + chain("right", 3)
    mixed = nn.ModuleDict({
        "trunk": nn.ModuleList(Bare() for _ in range(4)), "head": nn.Sequential(models.Block(), models.Block()),
    })  # fmt: skip
    assert names(mixed) == chain("trunk", 4) + chain("head", 2), "the longest run counts in any case"


def test_a_lone_block_counts_if_there_is_no_chain() -> None:
    assert names(nn.ModuleDict({"only": nn.ModuleList([models.Block()])})) == ["only.0"]
    inner = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList([models.Block()]), "rest": nn.Linear(2, 2)}))
    assert names(inner) == ["0.layers.0"]
