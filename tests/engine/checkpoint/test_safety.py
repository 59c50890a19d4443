"""What a load refuses: checkpoints of others, damage, tags; and what a save leaves alone."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch.distributed as dist
from sdp.engine.checkpoint import save
from sdp.engine.checkpoint.storage.directory import DirectoryTarget, latest
from sdp.engine.checkpoint.storage.files import is_ours, is_whole, read_state
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import engine_of
from sdp.tests.support.checkpoints import ALONE, load_alone, refusal_of_load, reseal
from sdp.tests.support.models import mlp
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(120)


def test_a_checkpoint_holds_no_pickle_of_metadata(small: Path) -> None:
    names = {path.name for path in (small / "step-1").iterdir()}
    assert names == {"state.json", "metadata.json", "__0_0.distcp"}
    assert set(read_state(small / "step-1")["files"]) == names - {"state.json"}
    assert json.loads((small / "step-1" / "metadata.json").read_text())["tensors"]


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "..", "", "a\0b"])
def test_a_file_outside_is_refused(small: Path, name: str) -> None:
    reseal(small / "step-1", files={**read_state(small / "step-1")["files"], name: "0" * 64})
    assert "is not the name of a file in this directory" in refusal_of_load(small)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("file", "../step-2/__0_0.distcp", "'../step-2/__0_0.distcp', which is not a file of this checkpoint"),
        ("file", "/etc/passwd", "'/etc/passwd', which is not a file of this checkpoint"),
        ("dtype", "load", "is 'load', which torch does not have"),
        ("size", 3, "damaged ("),
        ("chunks", None, "damaged ("),
    ],
)
def test_wrong_metadata_are_one_line(small: Path, key: str, value: Any, problem: str) -> None:
    file = small / "step-1" / "metadata.json"
    content = json.loads(file.read_text())
    tensor = next(tensor for tensor in content["tensors"].values() if tensor["size"])
    (tensor["chunks"][0] if key == "file" else tensor)[key] = value
    file.write_text(json.dumps(content))
    reseal(small / "step-1")
    message = refusal_of_load(small)
    assert "step-1/metadata.json: damaged (" in message and problem in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spikes", {"loss": 5}), ("global_steps", -1), ("global_steps", True), ("global_samples", 10**30),
        ("mesh", [0, 1, 1]), ("mesh", [1]), ("placement", []), ("scheduler", "x"), ("loader", [1]),
        ("learning_rates", {"a": None}), ("loss_scale", {"scale": "x"}), ("sync", {"fragments": -1}),
        ("client_state", []), ("files", {"a": 3}), ("settings", None),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_in_a_state_are_one_line(small: Path, key: str, value: Any) -> None:
    (small / "latest.json").unlink()
    reseal(small / "step-1")
    state = json.loads((small / "step-1" / "state.json").read_text())
    reseal(small / "step-1", **({"files": state["files"] | value} if key == "files" else {key: value}))
    assert f"step-1/state.json: damaged, {key}" in refusal_of_load(small)


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
    engine = engine_of(ALONE)
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
        engine_of(ALONE).save_checkpoint(small, "best")
    assert everything_in(small) == before


def test_a_link_in_place_of_the_pointers_draft_is_not_followed(small: Path) -> None:
    target = small / "precious"
    target.write_text("kept")
    for name in (".latest.json", ".latest.json.sdp-partial"):
        (small / name).symlink_to(target)
    engine_of(ALONE).save_checkpoint(small, "best")
    assert target.read_text() == "kept"
    assert latest(small) == "best"


class _Killed(BaseException):
    pass


def killed_save(folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: str) -> None:
    """Save ``step-1`` again, and be killed before the directory ``renamed`` is renamed."""
    rename = Path.rename

    def rename_unless_killed(path: Path, target: Path) -> Path:
        if path.name == renamed:
            raise _Killed
        return rename(path, target)

    engine = engine_of(ALONE)
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
            assert load_alone(small, tag) == (f"{small}/.step-1.sdp-replaced", {})
        assert latest(small) == "step-1"
        assert everything_in(small) == before
    engine_of(ALONE).save_checkpoint(small, "best")
    assert {path.name for path in small.iterdir()} == {"best", "latest.json", "step-1"}
    assert load_alone(small, "step-1") == (f"{small}/step-1", {})


def test_a_kill_before_the_renames_leaves_the_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_save(small, monkeypatch, "step-1")
    assert load_alone(small) == (f"{small}/step-1", {})
    engine_of(ALONE).save_checkpoint(small, "step-1", client_state={"third": True})
    assert {path.name for path in small.iterdir()} == {"latest.json", "step-1"}
    assert load_alone(small)[1] == {"third": True}


def test_a_directory_that_is_removed_during_a_save_is_not_made_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(ALONE)
    monkeypatch.setattr(DirectoryTarget, "enter", lambda *_: shutil.rmtree(small))
    with pytest.raises(CheckpointError, match="it was removed while the checkpoint was written"):
        engine.save_checkpoint(small, "step-2")
    assert not small.exists()


def test_what_is_half_written_is_not_a_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise _Killed

    with monkeypatch.context() as until, pytest.raises(_Killed):
        until.setattr(save, "write_tensors", killed)
        engine_of(ALONE).save_checkpoint(small, "step-7")
    partial = small / ".step-7.sdp-partial"
    assert is_ours(partial)
    assert not is_whole(partial)
    shutil.copytree(partial, small / "step-7")
    assert "did not finish" in refusal_of_load(small, "step-7")


def test_a_state_nested_too_deep_is_refused_when_it_is_saved_and_when_it_is_read(small: Path) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(CheckpointError, match="is not JSON"):
        engine_of(ALONE).save_checkpoint(small, "deep", client_state={"deep": deep})
    assert not (small / "deep").exists()
    (small / "step-1" / "state.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "state.json: damaged" in refusal_of_load(small)


# -- a damaged checkpoint is refused with one line -------------------------------------------------


def _damage(folder: Path, how: str) -> None:
    checkpoint = folder / "step-1"
    if how == "no state":
        (checkpoint / "state.json").unlink()
    elif how == "truncated state":
        (checkpoint / "state.json").write_text("{")
    elif how == "state without steps":
        (checkpoint / "state.json").write_text(json.dumps({"format": 1}))
    elif how == "other format":
        (checkpoint / "state.json").write_text(json.dumps({"format": 99}))
    elif how == "no metadata":
        (checkpoint / "metadata.json").unlink()
    elif how == "truncated metadata":
        (checkpoint / "metadata.json").write_bytes((checkpoint / "metadata.json").read_bytes()[:50])
    elif how == "no tensors":
        next(checkpoint.glob("*.distcp")).unlink()
    elif how == "truncated tensors":
        data = next(checkpoint.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:100])
    elif how == "one flipped bit":
        data = next(checkpoint.glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "changed step":
        state = (checkpoint / "state.json").read_text()
        (checkpoint / "state.json").write_text(state.replace('"global_steps": 1', '"global_steps": 2'))


DAMAGES = [
    "no state", "truncated state", "state without steps", "other format", "no metadata", "truncated metadata",
    "no tensors", "truncated tensors", "one flipped bit", "changed step",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(small: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small)
    _damage(small, how)
    with pytest.raises(CheckpointError) as error:
        engine_of(ALONE).load_checkpoint(small)
    assert "step-1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["truncated metadata", "truncated tensors"])
def test_right_hashes_do_not_make_a_file_trusted(small: Path, how: str) -> None:
    _damage(small, how)
    reseal(small / "step-1")
    with pytest.raises(CheckpointError, match="step-1"):
        engine_of(ALONE).load_checkpoint(small)


def test_a_pointer_to_nothing_falls_back_and_says_so(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(ALONE)
    engine.load_checkpoint(small)
    engine.save_checkpoint(small, "step-9")
    shutil.rmtree(small / "step-9")
    assert engine.load_checkpoint(small)[0] == f"{small}/step-1"
    assert "step-9, which is gone; using step-1" in caplog.text
    shutil.rmtree(small / "step-1")
    with pytest.raises(CheckpointError, match="step-9: is gone"):
        engine.load_checkpoint(small)


# -- tags: which ones are refused, and what ranks with different tags are told ---------------------


def save_with_its_own_tag(folder: str) -> str:
    engine = sdp.initialize(model=mlp(), config={"train_batch_size": 2, "sdp": {"groups": 2}})[0]
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
    return str(caught.value)


def test_different_tags_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    expected = "save_checkpoint: rank 0 has the tag 'tag-0', but rank 1 has 'tag-1'; give all ranks the same tag"
    assert ranks.run(save_with_its_own_tag, str(tmp_path), world=2) == [expected] * 2
    assert not list(tmp_path.iterdir())


WRONG_TAGS = ["../x", "/etc", "a/b", "..", "", ".hidden", "latest.json", None, 3, ["step-1"]]


@pytest.mark.parametrize("tag", WRONG_TAGS, ids=str)
def test_the_pointer_names_an_entry_of_its_directory(small: Path, tag: Any) -> None:
    (small / "latest.json").write_text(json.dumps({"tag": tag}))
    assert "which is not a checkpoint in this directory; remove this file to resume from step-1" in refusal_of_load(
        small
    )


NO_TAGS = [
    "latest.json", "state.json", "metadata.json", "a\0b", "a\nb", "a" * 5000, "..", ".", "", "/etc/x", "a/b", ".x",
]  # fmt: skip
NO_TAGS += [".x", ["step-1"], 10**400, -(10**400), 10**5000, math.nan, math.inf, "\udcff"]


@pytest.mark.parametrize("tag", NO_TAGS, ids=lambda tag: "huge" if isinstance(tag, int) else ascii(tag)[:20])
def test_a_wrong_tag_is_refused_before_anything_is_written(tmp_path: Path, tag: Any) -> None:
    engine = engine_of(ALONE)
    with pytest.raises(CheckpointError, match=r"the tag .* use letters, digits and dashes") as error:
        engine.save_checkpoint(tmp_path / "new", tag)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert not (tmp_path / "new").exists()


def test_a_number_is_a_tag_as_in_deepspeed(tmp_path: Path) -> None:
    engine_of(ALONE).save_checkpoint(tmp_path, 7)  # type: ignore[arg-type]
    assert latest(tmp_path) == "7"
    assert load_alone(tmp_path, 7)[0] == f"{tmp_path}/7"  # type: ignore[arg-type]
