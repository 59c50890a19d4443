"""The caller's own state, and the parts that a load may leave out."""

import argparse
import collections
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sdp.engine.checkpoint.client_state import CLIENT_TENSORS, ClientState
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import ALONE
from sdp.tests.support.ranks import RankPool
from torch import nn

STATE: dict[str, Any] = {
    "plain": {"a": [1, 2.5, "text", None, True], "inf": float("inf"), "": {"~": []}},
    "ordered": collections.OrderedDict([("z", 1), ("a", torch.ones(2))]),
    "tensor": torch.arange(6).view(2, 3)[:, 1:],
    "parameter": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    "scalar": torch.tensor(1.5, dtype=torch.float16),
    "nothing": torch.empty(0, 3),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "random": [torch.get_rng_state(), [[torch.ones(1)], None]],
    "a/b[0]": {'"': torch.zeros(1, dtype=torch.bool)},
}


def assert_same(loaded: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):
        assert type(loaded) is torch.Tensor
        assert loaded.dtype == saved.dtype
        assert torch.equal(loaded, saved)
    elif isinstance(saved, dict):
        assert list(loaded) == list(saved)
        for key, value in saved.items():
            assert_same(loaded[key], value)
    elif isinstance(saved, list):
        assert len(loaded) == len(saved)
        for one, other in zip(loaded, saved, strict=True):
            assert_same(one, other)
    else:
        assert type(loaded) is type(saved)
        assert loaded == saved


def test_what_is_saved_is_loaded(small: Path) -> None:
    engine = engine_of(ALONE)
    engine.save_checkpoint(small, 7, client_state=STATE)
    path, loaded = engine.load_checkpoint(small)
    assert path == str(small / "7")
    assert_same(loaded, STATE)
    assert (small / "7" / CLIENT_TENSORS).exists()
    assert engine.load_checkpoint(small, "step-1")[1] == {}


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "['bad']: object"),
    "function": (len, "builtin_function_or_method is neither JSON nor a plain tensor"),
    "tuple": ((1, 2), "tuple is neither JSON nor a plain tensor"),
    "size": (torch.Size([2]), "torch.Size is neither JSON nor a plain tensor"),
    "set": ({1}, "set is neither JSON nor a plain tensor"),
    "frozenset": (frozenset("a"), "frozenset is neither JSON nor a plain tensor"),
    "complex": (1j, "complex is neither JSON nor a plain tensor"),
    "bytes": (b"a", "bytes is neither JSON nor a plain tensor"),
    "namespace": (argparse.Namespace(a=1), "argparse.Namespace is neither JSON nor a plain tensor"),
    "path": (Path("a"), "pathlib.PosixPath is neither JSON nor a plain tensor"),
    "dtype": (torch.float16, "torch.dtype is neither JSON nor a plain tensor"),
    "array": (np.zeros(2), "numpy.ndarray is neither JSON nor a plain tensor"),
    "masked array": (np.ma.masked_array([1, 2], [True, False]), "MaskedArray is neither JSON"),
    "number of numpy": (np.float64(0.1), "numpy.float64 is neither JSON nor a plain tensor"),
    "enum": (signal.SIGTERM, "signal.Signals is neither JSON nor a plain tensor"),
    "deep inside": ([{"a": [{1}]}], "['bad'][0]['a'][0]: set"),
    "key": ({1: "a"}, "client_state['bad']: the key 1 has the type int, but keys in JSON are text"),
    "nested tensor": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "a nested tensor"),
    "jagged tensor": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    "sparse tensor": (torch.eye(2).to_sparse(), "a sparse tensor"),
    "complex tensor": (torch.ones(2, dtype=torch.complex64), "a complex tensor"),
    "meta tensor": (torch.empty(2, device="meta"), "a meta tensor"),
    "quantized tensor": (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "a quantized tensor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_by_name_and_type(kind: str) -> None:
    value, expected = REFUSED[kind]
    with pytest.raises(CheckpointError) as error:
        ClientState({"good": 1, "bad": value})
    message = str(error.value)
    assert "client_state['bad']" in message and expected in message
    assert message.endswith("give numbers, text, lists, dicts with text as keys, and dense real tensors")
    assert "\n" not in message


def test_an_outermost_key_is_text() -> None:
    with pytest.raises(CheckpointError, match="client_state: the key 1 has the type int"):
        ClientState({1: "one"})  # type: ignore[dict-item]


def test_the_file_of_tensors_is_checked(small: Path) -> None:
    engine = engine_of(ALONE)
    engine.save_checkpoint(small, "a", client_state={"tensor": torch.zeros(2)})
    file = small / "a" / CLIENT_TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"client_state\.safetensors: damaged"):
        engine.load_checkpoint(small)


def _load_in_parts(case: Case, folder: str) -> None:
    """Load the weights alone, and all but the optimizer's state."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    engine.save_checkpoint(folder, client_state={"rank 0's": torch.ones(2)})
    saved = engine.full_state_dict()
    moments = {name: {**engine.optimizer.state[p]} for name, p in engine.parameters_here.items()}
    one_step(engine, case, 1, data_rank=data_rank_of(case))
    engine.step()
    later = {
        name: {key: of.clone() for key, of in engine.optimizer.state[p].items()}
        for name, p in engine.parameters_here.items()
    }
    _, client = engine.load_checkpoint(folder, load_module_only=True)
    assert torch.equal(client["rank 0's"], torch.ones(2))
    assert engine.global_steps == 2
    _assert_weights(engine, saved)
    for name, parameter in engine.parameters_here.items():
        assert moments[name].keys() == later[name].keys()
        for key, value in engine.optimizer.state[parameter].items():
            assert torch.equal(value, later[name][key])
    fresh = engine_of(case)
    fresh.load_checkpoint(folder, load_optimizer_states=False)
    assert fresh.global_steps == 1
    assert not fresh.optimizer.state
    _assert_weights(fresh, saved)


def _assert_weights(engine: Any, expected: dict[str, torch.Tensor] | None) -> None:
    for name, value in (engine.full_state_dict() or {}).items():
        assert expected is not None
        assert torch.equal(value, expected[name]), name


def test_weights_alone_and_weights_without_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_load_in_parts, Case(2, 2, stage=3, optimizer="adamw", placement="mixed"), str(tmp_path), world=4)
