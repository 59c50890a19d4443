"""Pickled metadata of earlier formats: honest files load, and hostile ones are refused before they
do anything.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint import files as checkpoint_files
from sdp.engine.checkpoint import save
from sdp.engine.checkpoint.files import read_state
from sdp.engine.checkpoint.pickled_metadata import read_pickled_metadata
from sdp.tests.support.cases import engine_of
from sdp.tests.support.checkpoints import SOURCE, refusal_of_load, reseal, save_one_step
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of format 2, as DCP itself writes its metadata; tests change copies of it."""
    folder = tmp_path_factory.mktemp("format-2")
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(save, "MetadataWriter", FileSystemWriter)
        earlier.setattr(save, "METADATA", ".metadata")
        earlier.setattr(checkpoint_files, "FORMAT", 2)
        weights = save_one_step(folder)
    return folder, weights


@pytest.fixture
def pickled(_saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of format 2 for this test alone, and its weights."""
    shutil.copytree(_saved[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, _saved[1]


def test_a_new_checkpoint_holds_no_pickle_of_metadata(small: Path) -> None:
    names = {path.name for path in (small / "step-1").iterdir()}
    assert names == {"state.json", "metadata.json", "__0_0.distcp"}
    assert read_state(small / "step-1")["format"] == 3
    assert set(read_state(small / "step-1")["files"]) == names - {"state.json"}
    assert json.loads((small / "step-1" / "metadata.json").read_text())["tensors"]


def test_a_checkpoint_of_format_2_loads_bit_for_bit(pickled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, weights = pickled
    assert (folder / "step-1" / ".metadata").is_file()
    assert read_state(folder / "step-1")["format"] == 2
    engine = engine_of(SOURCE, "reference")
    engine.load_checkpoint(folder)
    loaded = engine.full_state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert engine.optimizer.state


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_gives_the_same(pickled: tuple[Path, Any], protocol: int) -> None:
    content = (pickled[0] / "step-1" / ".metadata").read_bytes()
    again = pickle.dumps(pickle.loads(content), protocol)
    assert read_pickled_metadata(again) == read_pickled_metadata(content)


def text(value: str) -> bytes:
    """The opcode that pushes a short string."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def slots(name: str, value: str) -> bytes:
    """The state ``(None, {name: value})``, for which an unpickler calls setattr."""
    return b"(N}" + text(name) + text(value) + b"st"


DCP = "torch.distributed.checkpoint.metadata"


FORGED = {
    "slots of a path class": named("pathlib", "PosixPath") + slots("_str", "/planted") + b"b.",
    "slots of DCP's class": named(DCP, "Metadata") + slots("planted", "yes") + b"b.",
    "slots of an object": named(DCP, "Metadata") + b")\x81" + slots("planted", "yes") + b"b.",
    "slots of a function": named("torch.serialization", "_get_layout") + slots("planted", "yes") + b"b.",
    "dict of a class": named(DCP, "Metadata") + b"}" + text("planted") + text("yes") + b"sb.",
    "slots of a called path": named("pathlib", "PosixPath") + text("x") + b"\x85R" + slots("_str", "/planted") + b"b.",
    "method of a path": b"".join(
        [
            named("pathlib", "PosixPath.touch"),
            named("pathlib", "PosixPath"),
            text("planted"),
            b"\x85R\x85R.",
        ]
    ),
    "system": named("os", "system") + text("touch planted") + b"\x85R.",
    "old system": b"cos\nsystem\n" + text("touch planted") + b"\x85R.",
    "call of what was called": named("torch", "Size") + b")R" + b")R.",
    "inst": b"(" + text("touch planted") + b"ios\nsystem\n.",
    "obj": b"(" + named("os", "system") + text("touch planted") + b"o.",
    "new with arguments": named("pathlib", "PosixPath") + text("x") + b"\x85" + b"}\x92.",
    "persistent": text("x") + b"Q.",
    "no metadata": b"N.",
    "empty": b"",
    "endless": b"(" * 1000,
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_pickle_changes_nothing(pickled: tuple[Path, Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled[0]
    monkeypatch.chdir(folder)
    (folder / "step-1" / ".metadata").write_bytes(b"\x80\x04" + FORGED[how])
    reseal(folder / "step-1")
    try:
        assert "step-1/.metadata: damaged or forged" in refusal_of_load(folder)
        assert "_str" not in vars(pathlib.PosixPath)
        assert not hasattr(Metadata, "planted")
        assert not (folder / "planted").exists()
    finally:
        if "_str" in vars(pathlib.PosixPath):  # every path of the process would be the planted one
            delattr(pathlib.PosixPath, "_str")


def _change_place(metadata: Any, key: str, value: Any) -> None:
    setattr(next(iter(metadata.storage_data.values())), key, value)


FORGED_CONTENT: dict[str, Callable[[Any], Any]] = {
    "path outside": lambda metadata: _change_place(metadata, "relative_path", "../outside.distcp"),
    "absolute path": lambda metadata: _change_place(metadata, "relative_path", "/etc/passwd"),
    "bytes": lambda metadata: metadata.state_dict_metadata.update(planted=BytesStorageMetadata()),
    "lost place": lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))),
    "transform": lambda metadata: _change_place(metadata, "transform_descriptors", ["zstd"]),
    "text as size": lambda metadata: setattr(next(iter(metadata.state_dict_metadata.values())), "size", "12"),
    "no tensors": lambda metadata: setattr(metadata, "state_dict_metadata", None),
}


@pytest.mark.parametrize("how", FORGED_CONTENT)
def test_wrong_values_in_a_pickle_are_refused(pickled: tuple[Path, Any], how: str) -> None:
    file = pickled[0] / "step-1" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    FORGED_CONTENT[how](metadata)
    file.write_bytes(pickle.dumps(metadata))
    reseal(pickled[0] / "step-1")
    assert "step-1/.metadata: damaged or forged" in refusal_of_load(pickled[0])
