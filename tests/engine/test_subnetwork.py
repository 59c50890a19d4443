"""Carving: what stands in for a block that is not held, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import ranks_models as models
import torch
from sdp.engine.errors import ModelError
from sdp.engine.placement import Placement
from sdp.engine.subnetwork import PassThrough, carve, masked
from sdp.engine.units import find_units
from torch import nn


def test_carving_keeps_names_and_frees_parameters() -> None:
    model = models.mlp()
    units = find_units(model, "auto")
    placement = Placement(2, tuple(u.name for u in units), ((0,), (0, 1), (0, 1), (1,)), tuple(u.numel for u in units))
    x, y = models.micro_batch("mlp", 0, 0, 0).values()
    hidden = model.stem(x)
    for index in (1, 2, 3):
        hidden = model.layers[index](hidden)
    expected = torch.nn.functional.mse_loss(model.head(hidden), y)
    stand_ins = carve(model, units, placement, 1)
    assert list(stand_ins) == ["layers.0"]
    assert len(model.layers) == 4
    kept = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith("layers.0") for name in kept)
    assert any(name.startswith("layers.3") for name in kept)
    assert all(p.is_meta for p in stand_ins["layers.0"].skeleton.parameters())
    assert torch.equal(model(x, y), expected)


def test_masking_is_undone() -> None:
    model = models.mlp()
    before = list(model.layers)
    stand_in = PassThrough("layers.1", models.Block())
    with pytest.raises(ValueError, match="inside"), masked(model, {"layers.1": stand_in}):
        assert model.layers[1] is stand_in
        raise ValueError("inside")
    assert list(model.layers) == before


class Returns(nn.Module):
    """A block that returns what ``make`` makes of its hidden state."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make
        self.kind = "sliding"

    def forward(self, hidden: torch.Tensor, *, mask: Any = None, cache: Any = None) -> Any:
        return self.make(self.linear(hidden))


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda h: h, lambda out, x: out is x),
        (lambda h: (h,), lambda out, x: type(out) is tuple and len(out) == 1 and out[0] is x),
        (lambda h: (h, None), lambda out, x: out[0] is x and out[1] is None),
        (lambda h: [None, h], lambda out, x: out[0] is None and out[1] is x),
        (lambda h: {"hidden": h, "cache": None}, lambda out, x: out["hidden"] is x and out["cache"] is None),
    ],
)
def test_the_blocks_own_structure_is_returned(make: Any, check: Any) -> None:
    stand_in = PassThrough("layers.0", Returns(make))
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert check(stand_in(x), x)
    assert check(stand_in(hidden=x, mask=torch.ones(3, dtype=torch.bool)), x)
    wide = torch.randn(5, 4)
    assert check(stand_in(wide), wide), "the structure is learnt once, shapes may change"
    assert list(stand_in.parameters()) == []


def test_plain_attributes_are_the_blocks() -> None:
    stand_in = PassThrough("layers.0", Returns(lambda h: h))
    assert stand_in.kind == "sliding"
    assert stand_in.name == "layers.0"
    for missing in ("linear", "no_such_thing"):
        with pytest.raises(AttributeError):
            getattr(stand_in, missing)


def test_training_mode_follows() -> None:
    block = models.Block().eval()
    stand_in = PassThrough("layers.0", block)
    assert not stand_in.training
    nn.ModuleList([stand_in]).train()
    assert stand_in.training
    assert stand_in.skeleton.get_submodule("norm").training
    stand_in.eval()
    assert not stand_in.skeleton.get_submodule("norm").training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda h: h[..., :2], r"layers.0: returns \(2, 2\) from \(2, 4\), so it cannot be skipped; leave it out of sdp.units"),
        (lambda h: (h, h), "layers.0: returns more than its hidden state"),
        (lambda h: (h, 1.0), "layers.0: returns more than its hidden state"),
        (lambda h: None, "layers.0: returns no tensor from|layers.0: returns no tensor"),
    ],
)
def test_blocks_that_cannot_be_skipped(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PassThrough("layers.0", Returns(make))(torch.randn(2, 4))


def test_a_call_without_a_tensor() -> None:
    with pytest.raises(ModelError, match=r"layers.0: was called without a tensor, so it cannot be skipped; leave it out of sdp.units"):
        PassThrough("layers.0", Returns(lambda h: h))(None)
