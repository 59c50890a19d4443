"""A hostile checkpoint is refused before it does anything. Entries of other programs are left alone."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint import files as checkpoint_files
from sdp.engine.checkpoint import save
from sdp.engine.checkpoint.files import encode_state, hash_files, is_ours, is_whole, latest, read_state
from sdp.engine.checkpoint.pickled_metadata import read_pickled_metadata
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import Case, engine_of, one_step
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

pytestmark = pytest.mark.timeout(120)

CASE = Case(2, 2, stage=3, optimizer="adamw", placement="mixed")


def saved_to(folder: Path) -> dict[str, torch.Tensor]:
    """Train a step, save it, and return the weights."""
    engine = engine_of(CASE, "reference")
    one_step(engine, CASE, 0, data_rank=None)
    engine.step()
    engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


def load(folder: Path, tag: str | None = None) -> Any:
    return engine_of(CASE, "reference").load_checkpoint(folder, tag)


def refusal(folder: Path, tag: str | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder, tag)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    saved_to(tmp_path)
    return tmp_path


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of format 2, as DCP itself writes its metadata."""
    with monkeypatch.context() as earlier:
        earlier.setattr(save, "MetadataWriter", FileSystemWriter)
        earlier.setattr(save, "METADATA", ".metadata")
        earlier.setattr(checkpoint_files, "FORMAT", 2)
        weights = saved_to(tmp_path)
    return tmp_path, weights


def reseal(path: Path, **changes: Any) -> None:
    """Make the hashes right again, as the author of a forged checkpoint would."""
    state = json.loads((path / "state.json").read_text())
    files = hash_files(file for file in path.iterdir() if file.name != "state.json")
    state = {**state, "files": {**state["files"], **files}, **changes}
    state.pop("sha256")
    (path / "state.json").write_text(encode_state(state))


# -- formats -------------------------------------------------------------------------------------------------------


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
    engine = engine_of(CASE, "reference")
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


# -- forged pickles ------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
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
        assert "step-1/.metadata: damaged or forged" in refusal(folder)
        assert "_str" not in vars(pathlib.PosixPath)
        assert not hasattr(Metadata, "planted")
        assert not (folder / "planted").exists()
    finally:
        if "_str" in vars(pathlib.PosixPath):  # every path of the process would be the planted one
            del pathlib.PosixPath._str


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
    assert "step-1/.metadata: damaged or forged" in refusal(pickled[0])


# -- forged JSON ---------------------------------------------------------------------------------------------------

WRONG_PLACES = {
    "file": ["../step-2/__0_0.distcp", "/etc/passwd", "nowhere.distcp", "state.json", "metadata.json", None, 3],
    "offset": [-1, 1.0, True, 2**62, 2**70, "0", None],
    "length": [-1, 2**62, None],
    "offsets": [[-1], [0, 0, 0, 0, 0], "0", None, [2**62]],
    "sizes": [[0], [-1], [True], None, [2**62]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_PLACES.items() for value in values])
def test_wrong_chunks_are_refused(small: Path, key: str, value: Any) -> None:
    file = small / "step-1" / "metadata.json"
    content = json.loads(file.read_text())
    tensor = next(tensor for tensor in content["tensors"].values() if tensor["size"])
    tensor["chunks"][0][key] = value
    file.write_text(json.dumps(content))
    reseal(small / "step-1")
    assert "step-1/metadata.json: damaged or forged" in refusal(small)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": None},
        {"dtype": "_C"},
        {"size": [-1]},
        {"size": [2**40, 2**40]},
        {"size": 3},
        {"chunks": []},
        {"more": 1},
    ],
    ids=str,
)
def test_wrong_tensors_are_refused(small: Path, change: dict[str, Any]) -> None:
    file = small / "step-1" / "metadata.json"
    content = json.loads(file.read_text())
    next(tensor for tensor in content["tensors"].values() if tensor["size"]).update(change)
    file.write_text(json.dumps(content))
    reseal(small / "step-1")
    assert "step-1/metadata.json: damaged or forged" in refusal(small)


@pytest.mark.parametrize("content", ["[]", "{}", '{"tensors": []}', "[" * 100_000, ""], ids=lambda text: text[:12])
def test_other_json_is_refused(small: Path, content: str) -> None:
    (small / "step-1" / "metadata.json").write_text(content)
    reseal(small / "step-1")
    assert "step-1/metadata.json: damaged or forged" in refusal(small)


# -- files ---------------------------------------------------------------------------------------------------------


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _as_link(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json", "state.json"])
@pytest.mark.parametrize("change", [_as_fifo, _as_socket, _as_link, _as_directory])
def test_only_regular_files_are_opened(small: Path, name: str, change: Callable[[Path], None]) -> None:
    change(small / "step-1" / name)
    assert f"step-1/{name}" in refusal(small)
    assert not is_ours(small / "step-1") or name != "state.json"


@pytest.mark.parametrize("change", [_as_fifo, _as_socket, _as_link, _as_directory])
def test_the_pointer_is_a_regular_file(small: Path, change: Callable[[Path], None]) -> None:
    change(small / "latest.json")
    assert "latest.json: cannot be read; remove this file to resume from step-1" in refusal(small)


WRONG_TAGS = ["../x", "/etc", "a/b", "..", "", ".hidden", "latest.json", None, 3, ["step-1"]]


@pytest.mark.parametrize("tag", WRONG_TAGS, ids=str)
def test_the_pointer_names_an_entry_of_its_directory(small: Path, tag: Any) -> None:
    (small / "latest.json").write_text(json.dumps({"tag": tag}))
    assert "which is not a checkpoint of this directory; remove this file to resume from step-1" in refusal(small)


@pytest.mark.parametrize("tag", ["../x", "/etc", "latest.json"])
def test_a_tag_that_is_asked_for_names_an_entry_of_the_directory(small: Path, tag: str) -> None:
    assert "is no name of one directory" in refusal(small, tag)


def test_an_unnamed_file_is_refused(small: Path) -> None:
    (small / "step-1" / "__1_0.distcp").write_bytes(b"extra")
    assert "step-1/__1_0.distcp: is not a file of this checkpoint" in refusal(small)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "..", ""])
def test_a_file_outside_is_refused(small: Path, name: str) -> None:
    reseal(small / "step-1", files={**read_state(small / "step-1")["files"], name: "0" * 64})
    message = refusal(small)
    assert f"names the file {name!r}, which is not in this directory" in message


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_a_file_without_a_hash_is_refused(small: Path, name: str) -> None:
    files = read_state(small / "step-1")["files"]
    reseal(small / "step-1", files={key: digest for key, digest in files.items() if key != name})
    assert f"step-1/{name}: is not a file of this checkpoint" in refusal(small)


# -- entries of others ---------------------------------------------------------------------------------------------


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(path.relative_to(folder)): path.lstat() for path in [folder, *folder.rglob("*")]}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in found.items()}


def test_entries_of_others_stay(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = shutil.copytree(small / "step-1", tmp_path_factory.mktemp("elsewhere") / "step-1")
    for name in (".venv.old", ".download.partial", ".cache.sdp-partial", ".mine.sdp-replaced", "step-0", "step-2"):
        (small / name).mkdir()
        (small / name / "precious").write_text("kept")
    (small / ".conf.old").write_text("kept")
    (small / ".conf.sdp-replaced").write_text("kept")
    (small / ".linked.sdp-replaced").symlink_to(elsewhere)
    (small / ".linked.sdp-partial").symlink_to(elsewhere)
    ours = (".", "latest.json", "step-1", *(f"step-1/{path.name}" for path in (small / "step-1").iterdir()))
    others = {key: value for key, value in everything_in(small).items() if key not in ours}
    assert len(others) == 16
    engine = engine_of(CASE, "reference")
    engine.load_checkpoint(small)
    for tag in ("step-1", "step-3", "step-4", "linked-not"):
        engine.save_checkpoint(small, tag, keep=1)
    after = everything_in(small)
    assert {key: after.get(key) for key in others} == others
    assert {path.name for path in elsewhere.iterdir()} == {"state.json", "metadata.json", "__0_0.distcp"}
    assert not (small / "step-3").exists()


@pytest.mark.parametrize("name", ["best", ".best.sdp-partial", ".best.sdp-replaced"])
def test_a_save_never_replaces_what_is_not_a_checkpoint(small: Path, name: str) -> None:
    (small / name).mkdir()
    (small / name / "precious").write_text("kept")
    before = everything_in(small)
    with pytest.raises(CheckpointError, match="move it away"):
        engine_of(CASE, "reference").save_checkpoint(small, "best")
    assert everything_in(small) == before


def test_a_link_in_place_of_the_pointers_draft_is_not_followed(small: Path) -> None:
    target = small / "precious"
    target.write_text("kept")
    for name in (".latest.json", ".latest.json.sdp-partial"):
        (small / name).symlink_to(target)
    engine_of(CASE, "reference").save_checkpoint(small, "best")
    assert target.read_text() == "kept"
    assert latest(small) == "best"


class _Killed(BaseException):
    pass


def killed_save(folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: str) -> None:
    """Save ``step-1`` again in a process that is killed before it renames the directory ``renamed``."""
    rename = Path.rename

    def rename_unless_killed(path: Path, target: Path) -> Path:
        if path.name == renamed:
            raise _Killed
        return rename(path, target)

    engine = engine_of(CASE, "reference")
    engine.load_checkpoint(folder)
    with monkeypatch.context() as until, pytest.raises(_Killed):
        until.setattr(Path, "rename", rename_unless_killed)
        engine.save_checkpoint(folder, "step-1", client_state={"second": True})


def test_after_a_kill_between_the_renames_a_load_changes_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_save(small, monkeypatch, ".step-1.sdp-partial")
    assert {path.name for path in small.iterdir()} == {".step-1.sdp-partial", ".step-1.sdp-replaced", "latest.json"}
    for pointer in (True, False):
        if not pointer:
            (small / "latest.json").unlink()
        before = everything_in(small)
        for tag in (None, "step-1"):
            assert load(small, tag) == (f"{small}/.step-1.sdp-replaced", {})
        assert latest(small) == "step-1"
        assert everything_in(small) == before
    engine_of(CASE, "reference").save_checkpoint(small, "best")
    assert {path.name for path in small.iterdir()} == {"best", "latest.json", "step-1"}
    assert load(small, "step-1") == (f"{small}/step-1", {})


def test_a_kill_before_the_renames_leaves_the_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_save(small, monkeypatch, "step-1")
    assert load(small) == (f"{small}/step-1", {})
    engine_of(CASE, "reference").save_checkpoint(small, "step-1", client_state={"third": True})
    assert {path.name for path in small.iterdir()} == {"latest.json", "step-1"}
    assert load(small)[1] == {"third": True}


def test_a_whole_load_changes_nothing(small: Path) -> None:
    before = everything_in(small)
    load(small)
    assert everything_in(small) == before


def test_what_is_half_written_is_not_a_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise _Killed

    with monkeypatch.context() as until, pytest.raises(_Killed):
        until.setattr(save, "_write_tensors", killed)
        engine_of(CASE, "reference").save_checkpoint(small, "step-7")
    partial = small / ".step-7.sdp-partial"
    assert is_ours(partial)
    assert not is_whole(partial)
    shutil.copytree(partial, small / "step-7")
    assert "did not finish" in refusal(small, "step-7")


@pytest.mark.parametrize("left", [[], [".state.json.sdp-partial"]], ids=str)
def test_a_save_killed_at_its_very_start_is_no_obstacle(small: Path, left: list[str]) -> None:
    partial = small / ".best.sdp-partial"
    partial.mkdir()
    for name in left:
        (partial / name).write_text("{")
    engine_of(CASE, "reference").save_checkpoint(small, "best")
    assert {path.name for path in small.iterdir()} == {"best", "latest.json", "step-1"}
