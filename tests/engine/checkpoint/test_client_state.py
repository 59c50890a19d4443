"""The caller's own state in a checkpoint, the parts that a load may leave out, and tags that are
numbers.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sdp.engine.checkpoint.client_state import CLIENT_TENSORS, ClientState, read_client_state
from sdp.engine.checkpoint.storage.files import encode_state, read_state
from sdp.engine.distributed.agreement import Ranks
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import SOURCE
from sdp.tests.support.ranks import RankPool

STATE: dict[str, Any] = {
    "plain": {"a": [1, 2.5, "text", None, True], "inf": float("inf")},
    "int keys": {1: "one", (2, 3): "pair", None: 0, 0.5: 1},
    "tag": {"~": "a key that looks like a tag"},
    "tuple": (1, (2, [3, (4,)]), {}),
    "arguments": argparse.Namespace(lr=0.1, layers=[1, 2], inner=argparse.Namespace(x=(1,))),
    "simple": types.SimpleNamespace(a=1),
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "tensor": torch.arange(6).view(2, 3)[:, 1:],
    "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
    "nothing": torch.empty(0, 3),
    "numpy": {"f4": np.float32(0.1), "i8": np.int64(-3), "bool": np.bool_(True), "text": np.array(["a", "bcd"])},
    "array": np.arange(6, dtype=">i2").reshape(2, 3).T,
    "empty array": np.zeros((0, 2)),
    "scalar array": np.array(3.5),
    "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state(),
        np.random.default_rng(3).bit_generator.state],
    "others": [complex(1, -2), b"\x00\xff", {1, 2}, frozenset("ab"), torch.Size([2, 3]), torch.float16,
        torch.device("cpu")],
    "path": Path("a/b"),
}  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    """Compare values, their types, and the types of what they contain."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, argparse.Namespace | types.SimpleNamespace):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


def test_what_is_saved_is_loaded(small: Path) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.save_checkpoint(small, 7, client_state=STATE)
    path, found = engine.load_checkpoint(small)
    assert path == str(small / "7")
    assert_same(found, STATE)
    random.setstate(found["rng"][0])
    np.random.set_state(found["rng"][1])
    torch.set_rng_state(found["rng"][2])
    assert (small / "7" / CLIENT_TENSORS).exists()


def test_the_outermost_keys_need_not_be_text(small: Path) -> None:
    engine, state = engine_of(SOURCE, "reference"), {1: "one", "~": torch.ones(2), (2, None): {"client_state": 3}}
    engine.save_checkpoint(small, "keys", client_state=state)
    assert_same(engine.load_checkpoint(small, "keys")[1], state)
    saved = read_state(small / "keys")
    for forged in ({}, {"client_state": [1]}, {"client_state": {"~": "tensor", "index": 0}}):
        with pytest.raises(CheckpointError, match="damaged or forged"):
            read_client_state(small / "keys", saved | {"client_state": forged}, Ranks(True))
    with pytest.raises(CheckpointError, match="has encoding 3, this version reads 1 and 2"):
        read_client_state(small / "keys", saved | {"client_encoding": 3}, Ranks(True))


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, [np.array([object()])], {"a": np.zeros(2, dtype=[("x", "i4")])},
        torch.empty(1, device="meta")],
    ids=["object", "function", "objects", "fields", "meta"],
)  # fmt: skip
def test_what_needs_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['bad'\]"):
        ClientState({"bad": value})


@pytest.mark.parametrize(
    "value",
    [
        {"~": "tensor", "index": 9}, {"~": "tensor", "index": []}, {"~": "os.system"}, {"~": ["tensor"]},
        {"~": "ndarray", "dtype": "|O", "shape": [1], "index": 0},
        {"~": "ndarray", "dtype": "<f8", "shape": [9], "index": 0},
        {"~": "ndarray", "dtype": "<f8", "shape": [-1], "index": 0}, {"~": "numpy.scalar", "dtype": "<f8", "hex": "00"},
        {"~": "ndarray", "dtype": "<U0", "shape": [2], "index": 0},
        {"~": "ndarray", "dtype": "<U0", "shape": [10**14], "index": 1}, [{"~": "tensor", "index": 0}],
        {"~": "numpy.scalar", "dtype": "<f8", "hex": ""}, {"~": "tuple"}, {"~": "tuple", "items": 3},
        {"~": "dict", "pairs": [[1]]},
        {"~": "dict", "pairs": [[[], 1]]}, {"~": "Namespace", "of": 1}, {"~": "torch.dtype", "name": "save"},
        {"~": "torch.device", "name": "x"}, {"~": "bytes", "hex": "zz"}, {"~": "complex", "parts": ["x", 1]},
        {"~": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_value_is_refused(small: Path, value: dict[str, Any]) -> None:
    tensors = {"tensor": torch.zeros(2), "empty": torch.zeros(0)}
    client = ClientState(tensors)
    engine = engine_of(SOURCE, "reference")
    engine.save_checkpoint(small, "forged", client_state=tensors)
    state = read_state(small / "forged")
    state["client_state"] = {**client.encoded, "bad": value}
    with pytest.raises(CheckpointError, match="damaged or forged"):
        read_client_state(small / "forged", state, Ranks(True))


def test_the_file_of_tensors_is_checked(small: Path) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.save_checkpoint(small, "a", client_state={"tensor": torch.zeros(2)})
    file = small / "a" / CLIENT_TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"client_state\.safetensors: damaged"):
        engine.load_checkpoint(small)


def test_a_checkpoint_of_an_earlier_version_has_plain_json(small: Path) -> None:
    state = read_state(small / "step-1") | {"client_state": {"~": "kept as it is", "a": [1]}}
    del state["client_encoding"]
    (small / "step-1" / "state.json").write_text(encode_state(state))
    assert engine_of(SOURCE, "reference").load_checkpoint(small)[1] == state["client_state"]


@pytest.mark.parametrize(("tag", "name"), [(3, "3"), (0.25, "0.25"), (np.int64(4), "4"), (np.float32(0.5), "0.5")])
def test_a_number_is_a_tag(small: Path, tag: Any, name: str) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.save_checkpoint(small, tag)
    assert engine.load_checkpoint(small, tag)[0] == str(small / name)


def test_a_checkpoint_that_is_not_the_newest(small: Path) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.save_checkpoint(small, "aside", save_latest=False)
    assert json.loads((small / "latest.json").read_text()) == {"tag": "step-1"}
    assert engine.load_checkpoint(small)[0] == str(small / "step-1")
    assert engine.load_checkpoint(small, "aside")[0] == str(small / "aside")


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


def test_backward_returns_the_loss_that_was_divided() -> None:
    case = Case(2, 1, accumulation=2)
    engine = engine_of(case, "reference")
    loss = engine(torch.ones(4, 5), torch.ones(4, 3))
    assert torch.equal(engine.backward(loss), loss / 2)
    engine.step()
    assert torch.equal(engine.backward(engine(torch.ones(4, 5), torch.ones(4, 3)), scale_wrt_gas=False), loss)
