"""A hostile checkpoint is refused before it does anything. Entries of other programs are left
alone.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.checkpoint import save
from sdp.engine.checkpoint.storage import dcp
from sdp.engine.checkpoint.storage.directory import latest
from sdp.engine.checkpoint.storage.files import encode_state, file_sizes, is_ours, is_whole, open_regular, read_state
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import engine_of
from sdp.tests.support.checkpoints import SOURCE, load_by_reference, refusal_of_load, reseal

pytestmark = pytest.mark.timeout(120)


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
    assert "step-1/metadata.json: damaged or forged" in refusal_of_load(small)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": None},
        {"dtype": "_C"},
        {"size": [-1]},
        {"size": [2**40, 2**40]},
        {"size": 3},
        {"size": [1] * 65},
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
    assert "step-1/metadata.json: damaged or forged" in refusal_of_load(small)


@pytest.mark.parametrize("content", ["[]", "{}", '{"tensors": []}', "[" * 100_000, ""], ids=lambda text: text[:12])
def test_other_json_is_refused(small: Path, content: str) -> None:
    (small / "step-1" / "metadata.json").write_text(content)
    reseal(small / "step-1")
    assert "step-1/metadata.json: damaged or forged" in refusal_of_load(small)


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
    assert f"step-1/{name}" in refusal_of_load(small)
    assert not is_ours(small / "step-1") or name != "state.json"


def test_only_regular_files_are_listed(small: Path) -> None:
    """This check and the one at opening must each be enough."""
    names = set(read_state(small / "step-1")["files"])
    for change in (_as_fifo, _as_socket, _as_link, _as_directory):
        folder = shutil.copytree(small / "step-1", small / f"step-of{change.__name__}")
        change(folder / "__0_0.distcp")
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is not a regular file"):
            file_sizes(folder, names)
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(folder / "__0_0.distcp")


@pytest.mark.parametrize("change", [_as_fifo, _as_link])
def test_a_file_that_is_replaced_while_it_is_opened(
    small: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO in its place does not wait for a writer, and a link is not followed."""
    path = small / "step-1" / "__0_0.distcp"
    before = path.lstat()
    change(path)
    monkeypatch.setattr(Path, "lstat", lambda _: before)
    try:
        with open_regular(path) as file:
            assert file.read(1) == b""
    except OSError as error:
        assert error.errno == errno.ELOOP


def test_a_list_of_tensors_that_is_too_large_is_not_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (small / "step-1" / "metadata.json").open("ab") as file:
        file.truncate(1 << 21)  # a sparse file of terabytes would take all memory
    monkeypatch.setattr(dcp, "MOST_BYTES", 1 << 20)
    reseal(small / "step-1")
    assert "metadata.json: damaged or forged (it is larger than 1 MiB)" in refusal_of_load(small)


@pytest.mark.parametrize("change", [_as_fifo, _as_socket, _as_link, _as_directory])
def test_the_pointer_is_a_regular_file(small: Path, change: Callable[[Path], None]) -> None:
    change(small / "latest.json")
    assert "latest.json: cannot be read; remove this file to resume from step-1" in refusal_of_load(small)


def test_an_unnamed_file_is_refused(small: Path) -> None:
    (small / "step-1" / "__1_0.distcp").write_bytes(b"extra")
    assert "step-1/__1_0.distcp: is not a file of this checkpoint" in refusal_of_load(small)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "..", ""])
def test_a_file_outside_is_refused(small: Path, name: str) -> None:
    reseal(small / "step-1", files={**read_state(small / "step-1")["files"], name: "0" * 64})
    message = refusal_of_load(small)
    assert f"names the file {name!r}, which is not in this directory" in message


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_a_file_without_a_hash_is_refused(small: Path, name: str) -> None:
    files = read_state(small / "step-1")["files"]
    reseal(small / "step-1", files={key: digest for key, digest in files.items() if key != name})
    assert f"step-1/{name}: is not a file of this checkpoint" in refusal_of_load(small)


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
    engine = engine_of(SOURCE, "reference")
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
        engine_of(SOURCE, "reference").save_checkpoint(small, "best")
    assert everything_in(small) == before


def test_a_link_in_place_of_the_pointers_draft_is_not_followed(small: Path) -> None:
    target = small / "precious"
    target.write_text("kept")
    for name in (".latest.json", ".latest.json.sdp-partial"):
        (small / name).symlink_to(target)
    engine_of(SOURCE, "reference").save_checkpoint(small, "best")
    assert target.read_text() == "kept"
    assert latest(small) == "best"


class _Killed(BaseException):
    pass


def killed_save(folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: str) -> None:
    """Save ``step-1`` again in a process that is killed before it renames the directory
    ``renamed``.
    """
    rename = Path.rename

    def rename_unless_killed(path: Path, target: Path) -> Path:
        if path.name == renamed:
            raise _Killed
        return rename(path, target)

    engine = engine_of(SOURCE, "reference")
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
            assert load_by_reference(small, tag) == (f"{small}/.step-1.sdp-replaced", {})
        assert latest(small) == "step-1"
        assert everything_in(small) == before
    engine_of(SOURCE, "reference").save_checkpoint(small, "best")
    assert {path.name for path in small.iterdir()} == {"best", "latest.json", "step-1"}
    assert load_by_reference(small, "step-1") == (f"{small}/step-1", {})


def test_a_kill_before_the_renames_leaves_the_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_save(small, monkeypatch, "step-1")
    assert load_by_reference(small) == (f"{small}/step-1", {})
    engine_of(SOURCE, "reference").save_checkpoint(small, "step-1", client_state={"third": True})
    assert {path.name for path in small.iterdir()} == {"latest.json", "step-1"}
    assert load_by_reference(small)[1] == {"third": True}


def test_a_directory_that_is_removed_during_a_save_is_not_made_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(SOURCE, "reference")
    monkeypatch.setattr(save, "refuse_unless_shared", lambda *_: shutil.rmtree(small))
    with pytest.raises(CheckpointError, match="it was removed while the checkpoint was written"):
        engine.save_checkpoint(small, "step-2")
    assert not small.exists()


def test_a_save_that_was_overtaken_does_not_move_the_pointer_back(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its process had been stopped, and another one had gone on and saved a later step."""
    engine = engine_of(SOURCE, "reference")
    hash_files, later = save.hash_files, json.dumps({"tag": "step-1"})

    def stopped(files: Any) -> Any:
        (small / "latest.json").write_text(later)
        return hash_files(files)

    (small / "latest.json").unlink()
    monkeypatch.setattr(save, "hash_files", stopped)
    with pytest.raises(CheckpointError, match=r"another process saved step-1 in .* while step-0"):
        engine.save_checkpoint(small, "step-0")
    assert (small / "latest.json").read_text() == later
    assert latest(small) == "step-1"


def test_a_whole_load_changes_nothing(small: Path) -> None:
    before = everything_in(small)
    load_by_reference(small)
    assert everything_in(small) == before


def test_what_is_half_written_is_not_a_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise _Killed

    with monkeypatch.context() as until, pytest.raises(_Killed):
        until.setattr(save, "write_tensors", killed)
        engine_of(SOURCE, "reference").save_checkpoint(small, "step-7")
    partial = small / ".step-7.sdp-partial"
    assert is_ours(partial)
    assert not is_whole(partial)
    shutil.copytree(partial, small / "step-7")
    assert "did not finish" in refusal_of_load(small, "step-7")


@pytest.mark.parametrize("left", [[], [".state.json.sdp-partial"]], ids=str)
def test_a_save_killed_at_its_very_start_is_no_obstacle(small: Path, left: list[str]) -> None:
    partial = small / ".best.sdp-partial"
    partial.mkdir()
    for name in left:
        (partial / name).write_text("{")
    engine_of(SOURCE, "reference").save_checkpoint(small, "best")
    assert {path.name for path in small.iterdir()} == {"best", "latest.json", "step-1"}


WRONG_VALUES = [None, [], {}, "x", -1, 1.5, True, 10**30, [[]], {"a": {"b": [None]}}, [1, "x"]]


def test_wrong_types_in_a_sealed_state_are_one_line(small: Path) -> None:
    """Every field is replaced by every wrong value.

    Either the load is refused in one line, or it succeeds.
    """
    engine, seen = engine_of(SOURCE, "reference"), set[str]()
    state = read_state(small / "step-1")
    original = (small / "step-1" / "state.json").read_text()
    fields = [(key,) for key in state]
    fields += [(key, inner) for key in state if isinstance(state[key], dict) for inner in [*state[key]][:1]]
    refused = 0
    for field in fields:
        for value in WRONG_VALUES:
            changed = copy.deepcopy(state)
            into = changed if len(field) == 1 else changed[field[0]]
            into[field[-1]] = value
            (small / "step-1" / "state.json").write_text(encode_state(changed))
            try:
                read_state(small / "step-1")
                if field[0] not in seen:  # one whole load for each field is enough where the value is possible
                    engine.load_checkpoint(small)
                    seen.add(field[0])
            except CheckpointError as error:
                assert "\n" not in str(error), (field, value)
                refused += 1
    assert refused > 5 * len(state)
    (small / "step-1" / "state.json").write_text(original)
    assert engine.load_checkpoint(small)[0] is not None


@pytest.mark.parametrize(
    "mesh", [[0, 1, 1], [1], [1, 1, 1, "x"], [1, 1, 1, [0]], [1, 1, 1, ["x"]], [1, 1, 1, 1], [1, 1, 1, [], 1]]
)
def test_a_mesh_has_sizes_of_at_least_one(small: Path, mesh: list[Any]) -> None:
    reseal(small / "step-1", mesh=mesh)
    assert "state.json: damaged, 'mesh' is [" in refusal_of_load(small)


def test_a_state_nested_too_deep_is_refused_when_it_is_saved_and_when_it_is_read(small: Path) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(CheckpointError, match="is not JSON"):
        engine_of(SOURCE, "reference").save_checkpoint(small, "deep", client_state={"deep": deep})
    assert not (small / "deep").exists()
    (small / "step-1" / "state.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "state.json: damaged" in refusal_of_load(small)
