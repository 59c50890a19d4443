"""Models of other libraries train as masked models, and some blocks stay shared."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.config import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ModelError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import find_units, find_unskippable
from sdp.tests.support import models
from sdp.tests.support.foreign import foreign_models
from sdp.tests.support.ranks import RankPool
from torch import nn

EAGER = ["gptj", "gpt-neo", "bloom", "falcon"]
KINDS = ["llama", "gpt2", "bert", "albert-of-two", "vit", "t5", "whisper", "swin", "resnet", "torchvision-resnet"]
KINDS += EAGER
# Blocks that forward masking shares, that run several times, that return several tensors; others.
BACKWARD = ["torchvision-resnet", "albert", "t5", "llama"]
RATE = 0.1


def config(**section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": foreign_models.ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 0},
        "sdp": {"groups": 2, "capacity": 0.5, **section},
    }


class Skip(nn.Module):
    """Returns the hidden state as a block of ``kind`` does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "t5":  # forward(hidden, mask, bias, encoder's states, encoder's mask, cross bias)
            return hidden, args[1], args[4]
        return (hidden, None) if self.kind in ("swin", *EAGER) else hidden


def train_by_hand(kind: str, holders: dict[str, tuple[int, ...]], masking: str) -> dict[str, torch.Tensor]:
    """New parameters after a step of SGD with a masked copy of the model for each group."""
    full = foreign_models.build(kind)
    gradients: list[dict[str, torch.Tensor]] = []
    for group in range(2):
        masked = copy.deepcopy(full)
        for name in (name for name, groups in holders.items() if group not in groups):
            if masking == "forward":
                masked.set_submodule(name, Skip(kind))
            else:
                masked.get_submodule(name).requires_grad_(False)
        output = masked(**foreign_models.make_batch(kind, group))
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        gradients.append({name: p.grad for name, p in masked.named_parameters() if p.grad is not None})
    new = {}
    for name, parameter in full.named_parameters():
        groups = next((held for unit, held in holders.items() if name.startswith(f"{unit}.")), (0, 1))
        mean = sum(gradients[group].get(name, torch.zeros(())) for group in groups) / len(groups)
        new[name] = parameter.detach() - RATE * mean
    return new


def one_step(kind: str, masking: str) -> tuple[Any, Any, Any]:
    engine = sdp.initialize(model=foreign_models.build(kind), config=config(masking=masking))[0]
    output = engine(foreign_models.make_batch(kind, engine.global_rank))
    engine.backward(output if isinstance(output, torch.Tensor) else output.loss)
    engine.step()
    return engine.full_state_dict(), engine.layout.placement.units, engine.layout.placement.holders


@pytest.mark.parametrize(
    ("kind", "masking"),
    [
        *((kind, "forward") for kind in KINDS),
        *((kind, "backward") for kind in BACKWARD),
        *(pytest.param(kind, "backward", marks=pytest.mark.slow) for kind in KINDS if kind not in BACKWARD),
    ],
)
def test_a_step_equals_that_of_masked_models(ranks: RankPool, kind: str, masking: str) -> None:
    found = [unit.name for unit in find_units(foreign_models.build(kind), "auto")]
    trained, units, of_units = ranks.run(one_step, kind, masking, world=2)[0]
    shared = find_unskippable(foreign_models.build(kind), found) if masking == "forward" else {}
    assert units == tuple(name for name in found if name not in shared)
    holders, changed = dict(zip(units, of_units, strict=True)), set()
    assert min(map(len, holders.values())) == 1
    start = foreign_models.build(kind).state_dict()
    for name, expected in train_by_hand(kind, holders, masking).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-7, msg=name)
        changed |= {unit for unit in holders if name.startswith(f"{unit}.") and not torch.equal(start[name], expected)}
    assert changed == set(holders)


@pytest.mark.parametrize("kind", EAGER)
def test_attention_weights_of_a_skipped_block_are_refused(ranks: RankPool, kind: str) -> None:
    ranks.run(ask_for_attention_weights, kind, world=2)


def ask_for_attention_weights(kind: str) -> None:
    def ask(engine: sdp.SDPEngine) -> None:
        engine(foreign_models.make_batch(kind, 0) | {"output_attentions": True})

    message = "output_attentions: a skipped block has no attention weights to return"
    engine = sdp.initialize(model=foreign_models.build(kind), config=config(masking="forward"))[0]
    with pytest.raises(ModelError, match=message):
        ask(engine)
    engine = sdp.initialize(model=foreign_models.build(kind), config=config(masking="forward"))[0]
    engine(foreign_models.make_batch(kind, 0))
    with pytest.raises(ModelError, match=message) as caught:
        ask(engine)
    assert "\n" not in str(caught.value)


def test_the_only_block_of_a_model_is_not_skipped() -> None:
    """No layer would be left. Groups may leave it frozen, or all have it."""
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    model = foreign_models.build("albert")
    assert [unit.name for unit in find_units(model, "auto")] == [name]
    with pytest.raises(
        ModelError, match=rf'"auto" finds only one block, {name}, and a group that skips it would have no'
    ):
        warnings_of(model, masking="forward")
    warnings_of(model, masking="forward", capacity=1.0)


def warnings_of(model: nn.Module, **section: Any) -> list[str]:
    return Layout.of(model, load_config(config(**section)), Mesh(2)).warnings()


def test_blocks_that_no_group_can_skip_are_named() -> None:
    shared, held = warnings_of(foreign_models.build("torchvision-resnet"), masking="forward")
    assert shared == (
        "all groups share blocks that no group could skip: layer2.0, layer3.0, layer4.0 (changes the shape of its "
        "input); "
        'to make them units, use sdp.masking "backward" or patterns in sdp.units'
    )
    assert held == (
        "a group holds up to 89% of the model's parameters; all groups share 45%: layer4.0 32%, layer3.0 8%, fc 2%, "
        "layer2.0 2%, conv1 1%; name more blocks in sdp.units, or lower sdp.capacity"
    )
    shared, *_ = warnings_of(foreign_models.build("t5"), masking="forward")
    assert "share blocks that no group could skip: encoder.block.0, decoder.block.0 (has an embedding" in shared
    assert warnings_of(foreign_models.build("t5"), masking="backward") == []


def test_named_units_are_not_left_out() -> None:
    blocks = [f"layer{stage}.{index}" for stage in range(1, 5) for index in range(2)]
    model = foreign_models.build("torchvision-resnet")
    assert Layout.of(model, load_config(config(units=["layer*.*"])), Mesh(2)).placement.units == tuple(blocks)
    model.unit_patterns = lambda: ["layer*.*"]
    assert Layout.of(model, load_config(config()), Mesh(2)).placement.units == tuple(blocks)


def test_named_units_that_cannot_be_skipped_are_refused(ranks: RankPool) -> None:
    ranks.run(skip_what_changes_shapes, world=2)


def skip_what_changes_shapes() -> None:
    model = foreign_models.build("torchvision-resnet")
    blocks = [f"layer{stage}.{index}" for stage in range(1, 5) for index in range(2)]
    model.unit_patterns = lambda: ["layer*.*"]
    settings = config(placement={name: [0] for name in blocks} | {"layer1.0": [0, 1]})
    engine = sdp.initialize(model=model, config=settings)[0]
    refused = (
        r"layer2\.0: returns \(2, 8, 8, 8\) from \(2, 4, 16, 16\); layer3\.0: .*; layer4\.0: .*, so they cannot be "
        r"skipped"
    )
    rows = foreign_models.make_batch("torchvision-resnet", 0)
    with pytest.raises(ModelError, match=refused) if engine.global_rank else nullcontext():
        engine(rows)


def test_a_model_of_downsampling_blocks_is_refused() -> None:
    model = nn.ModuleDict(
        {"layers": nn.Sequential(*(foreign_models.BasicBlock(2**i, 2 ** (i + 1), 2) for i in (1, 2)))}
    )
    with pytest.raises(ModelError, match=r"finds no block that a group could skip: layers\.0 changes .*; layers\.1 ch"):
        warnings_of(model, masking="forward")


def test_a_group_that_holds_most_of_the_model_is_warned_of() -> None:
    model = models.mlp()
    model.tables = nn.ModuleDict({"words": nn.Embedding(1000, 8), "places": nn.Embedding(100, 8)})
    (note,) = warnings_of(model)
    assert note == (
        "a group holds up to 93% of the model's parameters; all groups share 87%: tables 86%; "
        "name more blocks in sdp.units, or lower sdp.capacity"
    )
    assert warnings_of(model, capacity=1.0) == [], "every group holds every unit, as asked"
    model.tables = nn.Embedding(1000, 8)
    (note,) = warnings_of(model)
    assert note.endswith("all groups share 86%: tables 85%; lower sdp.capacity"), "a table has no blocks to name"
    assert warnings_of(models.mlp(12)) == []
