"""Carving: what stands in for a block that is not held, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sdp.engine.errors import ModelError
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.units import find_units
from sdp.engine.subnetwork.carve import PassThrough, carve, refuse_together
from sdp.tests.support import models
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


class Returns(nn.Module):
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


class Biased(nn.Module):
    """Returns its bias and a keyword as they are, as blocks of T5 do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, bias: Any = None, **kwargs: Any) -> Any:
        if bias is None:
            bias = torch.zeros(3, device=hidden.device)
        return self.linear(hidden), bias, kwargs.get("cross"), None


def test_inputs_that_a_block_returns_are_passed_on() -> None:
    x, bias, cross = torch.randn(2, 4), torch.randn(3, requires_grad=True), torch.randn(2)
    stand_in = PassThrough("layers.1", Biased())
    for _ in range(2):
        out = stand_in(x, bias, cross=cross)
        assert type(out) is tuple
        assert [id(leaf) for leaf in out] == [id(x), id(bias), id(cross), id(None)]
    with pytest.raises(ModelError, match=r"layers\.0: returns more than its hidden state, so it cannot be skipped"):
        PassThrough("layers.0", Biased())(x)


def test_a_refusal_names_all_blocks() -> None:
    blocks = [Returns(lambda h: h), Returns(lambda h: h[:1]), Biased()]
    stand_ins = [PassThrough(str(index), block) for index, block in enumerate(blocks)]
    model = nn.Sequential(*stand_ins)
    refuse_together(model, stand_ins)
    message = (
        r"^1: returns \(1, 4\) from \(2, 4\); 2: returns more than its hidden state, so they cannot be skipped; "
        r'leave them out of sdp\.units, list them in sdp\.protect, or use sdp\.masking "backward"$'
    )
    x = torch.randn(2, 4)
    with pytest.raises(ModelError, match=message):
        model(x)
    with pytest.raises(ModelError, match=r"^1: returns \(1, 4\) from \(2, 4\), so it cannot be skipped"):
        model(x)


def test_plain_attributes_are_the_blocks() -> None:
    stand_in = PassThrough("layers.0", Returns(lambda h: h))
    assert stand_in.kind == "sliding"
    assert stand_in.name == "layers.0"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = stand_in.no_such_thing


def test_children_and_parameters_can_be_looked_at() -> None:
    stand_in = PassThrough("layers.0", Returns(lambda h: h))
    assert stand_in.linear.weight.dtype is torch.float32
    assert stand_in.linear.weight.shape == (4, 4)
    assert stand_in.linear.weight.is_meta
    assert [*stand_in.parameters(), *stand_in.children(), *stand_in.state_dict()] == [], "they are not the subnetwork's"


class MaskFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        return hidden_states + self.linear(hidden_states)


class Keywords(nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return inputs["hidden"]


def test_the_hidden_state_is_the_first_parameter_of_forward() -> None:
    x, mask = torch.randn(2, 4), torch.zeros(2, 4)
    stand_in = PassThrough("layers.0", MaskFirst())
    assert stand_in(attention_mask=mask, hidden_states=x) is x
    assert stand_in(attention_mask=mask, position_ids=mask, hidden_states=x) is x
    assert stand_in(x, mask) is x
    assert PassThrough("layers.0", Keywords())(hidden=x, n=3) is x
    with pytest.raises(
        ModelError, match=r"layers.0: it is unclear which argument of forward is the hidden state: mask, hidden;"
    ):
        PassThrough("layers.0", Keywords())(mask=mask, hidden=x)


class ReadsValues(nn.Module):
    """Cannot run on the meta device."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.norm, self.fails = nn.BatchNorm1d(4), fails

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if self.fails or x.sum().item() > 1e9:
            raise ValueError("two\nlines")
        return (x + self.norm(x),)


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.seen.append(x + cache.seen[-1].cpu())  # fails on the meta device
        return x + self.linear(x)


def test_objects_that_a_block_writes_to_stay_as_they_are() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    before = 2 * x  # not a leaf, which torch does not copy
    cache = SimpleNamespace(seen=[before])
    assert PassThrough("layers.0", Caches())(x, cache) is x
    assert len(cache.seen) == 1
    assert cache.seen[0] is before


def test_blocks_that_cannot_run_on_the_meta_device() -> None:
    x = torch.randn(2, 4)
    before = torch.get_rng_state()
    stand_in = PassThrough("layers.0", ReadsValues())
    out = stand_in(x)
    assert type(out) is tuple
    assert out[0] is x
    assert all(tensor.is_meta for tensor in (*stand_in.skeleton.parameters(), *stand_in.skeleton.buffers()))
    assert torch.equal(torch.get_rng_state(), before)
    message = (
        r"^layers.1: the form of its result is unknown, .* on zeros \(ValueError: two lines\), so it cannot "
        r"be skipped"
    )
    with pytest.raises(ModelError, match=message):
        PassThrough("layers.1", ReadsValues(fails=True))(x)


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
        (
            lambda h: h[..., :2],
            r"layers.0: returns \(2, 2\) from \(2, 4\), so it cannot be skipped; leave it out of sdp.units",
        ),
        (lambda h: (h, h), "layers.0: returns more than its hidden state"),
        (lambda h: (h, 1.0), "layers.0: returns more than its hidden state"),
        (lambda h: None, "layers.0: returns no tensor from|layers.0: returns no tensor"),
    ],
)
def test_blocks_that_cannot_be_skipped(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PassThrough("layers.0", Returns(make))(torch.randn(2, 4))


def test_a_call_without_a_tensor() -> None:
    with pytest.raises(
        ModelError, match=r"layers.0: was called without a tensor, so it cannot be skipped; leave it out of sdp.units"
    ):
        PassThrough("layers.0", Returns(lambda h: h))(None)
