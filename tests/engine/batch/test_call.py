"""Batches of every shape, what is a loss and what is a target."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.batch.call import call_model, count_targets, loss_of, tensors_in, to_device
from sdp.engine.errors import DataError, ModelError
from torch import nn

X, Y = torch.arange(6.0).view(2, 3), torch.tensor([1, 2])


@dataclass
class Output:
    loss: torch.Tensor
    hidden: dict[str, torch.Tensor] | None = None
    kind: str = "fine"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


Pair = namedtuple("Pair", "x y")


def test_looking_for_tensors_writes_nothing() -> None:
    class Validated(UserDict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            assert isinstance(value, torch.Tensor | str)
            super().__setitem__(key, value)

    tree = [Validated(x=X, name="a"), Frozen(Y, X), {"deep": (X, [Output(Y)])}]
    assert [id(found) for found in tensors_in(tree)] == [id(tensor) for tensor in (X, Y, X, X, Y)]


@pytest.mark.parametrize("batch", [Frozen(X, Y), Pair(X, Y), UserDict(x=X, y=Y), {"x": X, "y": Y}])
def test_batches_are_moved(batch: Any) -> None:
    def parts(tree: Any) -> list[torch.Tensor]:
        return list(tree.values()) if isinstance(tree, dict | UserDict) else [tree.x, tree.y]

    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert [part.shape for part in parts(moved)] == [X.shape, Y.shape]
    assert all(part.is_meta for part in parts(moved))
    assert not any(part.is_meta for part in parts(batch)), "the caller's batch stays as it is"


class Records(nn.Linear):
    """Keeps what it was called with."""

    def forward(self, x: Any, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.seen = [x, y]
        return self.weight.sum()


def test_the_engine_moves_a_batch_to_its_device(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    engine = sdp.initialize(model=Records(2, 2), config={"train_micro_batch_size_per_gpu": 2, "sdp": {"groups": 1}})[0]
    held, labels = Output(X.to(engine.device)), Y.to(engine.device)
    engine(held, y=labels)
    assert engine.module.seen[0] is held, "nothing had to be moved, so the caller's objects stay the same"
    assert engine.module.seen[1] is labels
    monkeypatch.setattr(type(engine), "device", property(lambda self: torch.device("meta")))
    for args, kwargs in ((({"x": X, "y": Y},), {}), ((X,), {"y": Y}), ((X, Y), {}), ((UserDict(x=X, y=Y),), {})):
        engine(*args, **kwargs)
        assert [tensor.is_meta for tensor in engine.module.seen] == [True, True]
    with torch.inference_mode():
        engine(Output(X, {"h": X}), Y)
    assert not engine.module.seen[1].is_inference()
    assert engine.module.seen[0].loss.is_meta and engine.module.seen[0].hidden["h"].is_meta
    assert not X.is_meta and not held.loss.is_meta


def test_losses() -> None:
    loss = torch.tensor(2.0)
    assert all(loss_of(output) is not None for output in (loss, loss[None], {"loss": loss}, (None, loss), Output(loss)))
    for output in ("no loss", {"logits": loss}, (torch.zeros(2),), None):
        with pytest.raises(ModelError, match="no loss was found"):
            loss_of(output)
    with pytest.raises(ModelError, match="scalar loss"):
        loss_of(torch.zeros(2))


class Labelled(nn.Module):
    def forward(self, input_ids: Any, labels: Any) -> None: ...


class Causal(Labelled):
    loss_type = "ForCausalLM"  # as Hugging Face's models say it


class GPT2LMHeadModel(Labelled):
    loss_type = None  # transformers takes the causal loss then


class Tagger(Labelled):
    loss_type = "ForTokenClassification"


class One(nn.Module):
    def forward(self, batch: Any) -> None: ...


def test_targets() -> None:
    tokens = torch.tensor([[1, 2, -100, 4]])
    for causal in (Causal(), GPT2LMHeadModel()):
        # The first position predicts nothing.
        assert count_targets(causal, {"input_ids": tokens, "labels": tokens}) == 2
        assert count_targets(causal, (tokens, tokens)) == 2, "the same model on the same tensors, by position"
    for model in (One(), Labelled()):
        assert count_targets(model, {"input_ids": tokens, "labels": tokens}) == 3, (
            "nothing says that labels are shifted"
        )
        assert count_targets(model, (tokens, tokens)) == 3
    assert count_targets(Labelled(), (tokens, torch.tensor([1, -100]))) == 1
    assert int(count_targets(Tagger(), {"input_ids": tokens, "labels": tokens})) == 3
    assert count_targets(One(), (torch.zeros(3, 2), torch.tensor([1, -100, 0]))) == 2
    assert int(count_targets(One(), {"x": torch.zeros(3, 2), "y": torch.zeros(3, 4)})) == 12
    assert int(count_targets(One(), Frozen(X, Y))) == 2
    with pytest.raises(DataError, match="no tensor"):
        int(count_targets(One(), ["text"]))


class Defaults(nn.Module):
    def forward(self, x: Any, y: Any = 0, *, z: Any = 0) -> tuple[Any, ...]:
        return x, y, z


class Two(nn.Module):
    def forward(self, x: Any, y: Any, z: Any = 0) -> tuple[Any, ...]:
        return x, y, z


class AnyKeywords(nn.Module):
    def forward(self, batch: Any, **more: Any) -> tuple[Any, ...]:
        return batch, more


class AnyPositions(nn.Module):
    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return inputs


def test_arguments_are_spread_by_name_and_place() -> None:
    assert call_model(Defaults(), {"x": 1, "z": 3}) == (1, 0, 3)
    assert call_model(Defaults(), {"input": 1}) == ({"input": 1}, 0, 0)
    assert call_model(Defaults(), {"z": 3}) == ({"z": 3}, 0, 0), "x is missing, so these are not its arguments"
    assert call_model(AnyKeywords(), {"x": 1, "y": 2}) == ({"x": 1, "y": 2}, {})
    assert call_model(AnyKeywords(), {"batch": 1, "y": 2}) == (1, {"y": 2})
    assert call_model(Two(), (1, 2)) == (1, 2, 0)
    assert call_model(Two(), [1, 2, 3]) == (1, 2, 3)
    assert call_model(AnyPositions(), (1, 2, 3)) == (1, 2, 3)
    assert call_model(Defaults(), (X, Y)) == (X, Y, 0), "as nanoGPT's forward(idx, targets=None)"
    assert call_model(Defaults(), [X]) == (X, 0, 0), "as a DataLoader of a TensorDataset gives it"
    for texts in (["one"], ["one", "two"]):
        assert call_model(Defaults(), texts) == (texts, 0, 0)
    assert call_model(One(), (X, Y)) is None, "forward takes one argument, as DeepSpeed passes it"
    assert call_model(Defaults(), (X, Y, Y)) == ((X, Y, Y), 0, 0)


def test_keys_that_are_too_many_are_named() -> None:
    with pytest.raises(
        DataError, match=r"^a batch has w, which Two.forward\(x, y, z\) does not take; leave it out of the batch$"
    ):
        call_model(Two(), {"x": 1, "y": 2, "w": 3})
    linear = nn.Linear(1, 1)
    with pytest.raises(
        DataError,
        match=r"^a batch has labels, mask, which Linear.forward\(input\) does not take; leave it out of .* \(",
    ):
        call_model(linear, {"input": X, "labels": 2, "mask": 3})
    whole = {"x": 1, "labels": 2}
    assert call_model(Defaults(), whole) == (whole, 0, 0), "it may be the one argument"


@pytest.mark.parametrize("batch", [(1, 2, 3, 4), (1,), {"x": 1}, {"x": 1, "w": 2}])
def test_batches_that_fit_no_call(batch: Any) -> None:
    with pytest.raises(
        DataError, match=r"a batch \(.*\) does not fit Two.forward\(x, y, z\): missing a required argument: 'y'"
    ):
        call_model(Two(), batch)
