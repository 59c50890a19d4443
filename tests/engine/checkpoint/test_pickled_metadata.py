"""Pickled metadata of earlier formats: honest files load, and hostile ones are refused before they
do anything.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint import save
from sdp.engine.checkpoint.storage import files as checkpoint_files
from sdp.engine.checkpoint.storage.files import read_state
from sdp.engine.checkpoint.storage.pickled_metadata import read_pickled_metadata
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


def made(module: str, name: str, state: bytes) -> bytes:
    """An object that is made empty, and then gets its state."""
    return named(module, name) + b")\x81" + state + b"b"


def dictionary(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}" + b"".join(key + value + b"s" for key, value in pairs)


def size_of(values: bytes) -> bytes:
    return named("torch", "Size") + values + b"\x85R"


DCP = "torch.distributed.checkpoint.metadata"
# A tuple that holds the same tuple twice, 60 times. To hash or to print it takes 2^60 steps.
NESTED = b")" + b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(60))


def metadata_with(fqn: bytes, offset: bytes) -> bytes:
    stored = made("torch.distributed.checkpoint.filesystem", "_StorageInfo", b"}")
    index = made(DCP, "MetadataIndex", dictionary((text("fqn"), fqn), (text("offset"), offset)))
    return made(DCP, "Metadata", dictionary((text("storage_data"), dictionary((index, stored))))) + b"."


# What is refused, and the part of the reader that refuses it.
CHANGES, NOT_WRITTEN = "it changes something", "which DCP does not write"
FORGED: dict[str, tuple[bytes, str]] = {
    "slots of a path class": (named("pathlib", "PosixPath") + slots("_str", "/planted") + b"b.", CHANGES),
    "slots of DCP's class": (named(DCP, "Metadata") + slots("planted", "yes") + b"b.", CHANGES),
    "slots of an object": (made(DCP, "Metadata", slots("planted", "yes")) + b".", "Metadata to a tuple"),
    "slots of a function": (
        named("torch.serialization", "_get_layout") + slots("planted", "yes") + b"b.", CHANGES,
    ),
    "dict of a class": (named(DCP, "Metadata") + dictionary((text("planted"), text("yes"))) + b"b.", CHANGES),
    "slots of a called path": (
        named("pathlib", "PosixPath") + text("x") + b"\x85R" + slots("_str", "/planted") + b"b.",
        "it sets the state of pathlib.PosixPath,",
    ),
    "a state that is set twice": (
        made(DCP, "Metadata", b"}") + b"}b.", f"it sets the state of {DCP}.Metadata, {NOT_WRITTEN}",
    ),
    "method of a path": (
        named("pathlib", "PosixPath.touch") + named("pathlib", "PosixPath") + text("planted") + b"\x85R\x85R.",
        "it names pathlib.PosixPath.touch, which no checkpoint",
    ),
    "system": (named("os", "system") + text("touch planted") + b"\x85R.", "it names os.system, which no checkpoint"),
    "old system": (b"cos\nsystem\n" + text("touch planted") + b"\x85R.", "it names os.system, which no checkpoint"),
    "a function of torch": (named("torch", "load") + b".", "it names torch.load, which no checkpoint"),
    "call of what was called": (named("torch", "Size") + b")R" + b")R.", "it calls torch.Size in a way"),
    "call of a class": (named(DCP, "Metadata") + b")R.", f"it calls {DCP}.Metadata in a way"),
    "an empty object of a function": (named("torch", "Size") + b")\x81.", "it calls torch.Size in a way"),
    "call with a list": (named("torch", "Size") + b"]R.", "it calls torch.Size in a way"),
    "call of a number": (b"K\x01)R.", "it calls something in a way"),
    "inst": (b"(" + text("touch planted") + b"ios\nsystem\n.", "it has the instruction INST"),
    "obj": (b"(" + named(DCP, "Metadata") + b"o.", "it has the instruction OBJ"),
    "new with arguments": (
        named("pathlib", "PosixPath") + text("x") + b"\x85" + b"}\x92.", "it has the instruction NEWOBJ_EX",
    ),
    "persistent": (text("x") + b"Q.", "it has the instruction BINPERSID"),
    "no metadata": (b"N.", "it has something else where DCP writes a Metadata"),
    "a record without a state": (named(DCP, "Metadata") + b")\x81.", "something else where DCP writes a Metadata"),
    "empty": (b"", "exhausted"),
    "endless": (b"(" * 1000, "exhausted"),
    "takes too much": (b"K\x01\x86.", "it takes more values than there are"),
    "a nested key": (dictionary((NESTED, b"N")) + b".", "a dictionary has a key that DCP does not write"),
    "a nested name": (NESTED + text("x") + b"\x93.", "it names something by a value that is not text"),
    "a nested tensor's name": (
        metadata_with(NESTED, size_of(b")")), "it has something else where DCP writes a text",
    ),
    "a nested offset": (metadata_with(text("a"), size_of(NESTED)), "it has something else where DCP writes a number"),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGED)
def test_each_guard_of_the_reader_says_what_it_refuses(how: str) -> None:
    """One guard alone must be enough: no case waits for a later one."""
    content, message = FORGED[how]
    with pytest.raises(ValueError, match=re.escape(message)):
        read_pickled_metadata(b"\x80\x04" + content)


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_pickle_changes_nothing(pickled: tuple[Path, Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled[0]
    monkeypatch.chdir(folder)
    (folder / "step-1" / ".metadata").write_bytes(b"\x80\x04" + FORGED[how][0])
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


def nested() -> Any:
    """A tuple that holds the same tuple twice, 60 times."""
    value: Any = ()
    for _ in range(60):
        value = (value, value)
    return value


FORGED_CONTENT: dict[str, Callable[[Any], Any]] = {
    "path outside": lambda metadata: _change_place(metadata, "relative_path", "../outside.distcp"),
    "absolute path": lambda metadata: _change_place(metadata, "relative_path", "/etc/passwd"),
    "bytes": lambda metadata: metadata.state_dict_metadata.update(planted=BytesStorageMetadata()),
    "lost place": lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))),
    "transform": lambda metadata: _change_place(metadata, "transform_descriptors", ["zstd"]),
    "text as size": lambda metadata: setattr(next(iter(metadata.state_dict_metadata.values())), "size", "12"),
    "nested path": lambda metadata: _change_place(metadata, "relative_path", nested()),
    "nested offset": lambda metadata: _change_place(metadata, "offset", nested()),
    "nested length": lambda metadata: _change_place(metadata, "length", nested()),
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
