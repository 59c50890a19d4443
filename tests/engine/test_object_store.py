"""Folders and checkpoints in an object store, also one whose connections break."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sdp.engine import object_store
from sdp.engine.checkpoint.storage.remote import newest
from sdp.engine.errors import CheckpointError, ConfigError, StoreError
from sdp.engine.files import PARTIAL
from sdp.engine.object_store import Store, fetch, is_url, local_copy, upload
from sdp.tests.support.cases import Case, engine_of, one_step
from sdp.tests.support.checkpoints import ALONE, SOURCE, merge_moments, moments_of, train_and_save
from sdp.tests.support.foreign.object_stores import Fault, FaultyServer, faulty_server
from sdp.tests.support.ranks import RankPool, rank_alone

MARKER, REPLACED = "index.json", re.compile(r".*\.bin|index\.json")


@pytest.fixture(scope="module", params=["s3", "gs"])
def running(request: pytest.FixtureRequest) -> Iterator[FaultyServer]:
    with faulty_server(request.param) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_store, "ATTEMPTS", 3)
    return tmp_path / "cache"


@pytest.fixture
def server(running: FaultyServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in running.variables().items():
        monkeypatch.setenv(name, value)
    if running.scheme == "gs":  # gcsfs makes six attempts itself, and waits for longer and longer

        async def no_wait(_: float) -> None:
            pass

        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=no_wait))
    yield running
    running.faults.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a folder in it, which has a marker of its own."""
    files = {"a.bin": b"a" * 70_000, "b.bin": b"b", "index.json": b"1", "clusters/index.json": b"2", "empty.bin": b""}
    for name, content in files.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "made"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_url_is_told_from_a_path() -> None:
    assert is_url("s3://bucket/run") and is_url("file:///tmp/run")
    assert not is_url("runs/s3") and not is_url(Path("runs/s3")) and not is_url("C:/runs")
    with pytest.raises(ConfigError, match=r"s3:/bucket/run: was a URL .* give the URL as text"):
        is_url(Path("s3://bucket/run"))
    for wrong in ("s3:/bucket/run", "s3://", "S3://bucket/run"):
        with pytest.raises(ConfigError, match=f"{wrong}: is no URL such as s3://bucket/folder"):
            is_url(wrong)
    with pytest.raises(ConfigError, match="leads out"):
        local_copy("s3://bucket/../../etc")


def test_a_folder_on_disk_arrives_whole(folder: Path, cache: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/corpus"
    assert fetch(url, MARKER) is None
    upload(folder, url, MARKER, REPLACED)
    copy = fetch(url, MARKER)
    assert copy == local_copy(url) and copy.is_relative_to(cache)
    assert contents(copy) == contents(folder)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="copy: cannot be written"):
        fetch(url, MARKER, tmp_path / "file" / "copy")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "gs://bucket/run",
            r"gs://bucket/run: a package is missing \(.*gcsfs.*\); for s3://, run pip install .*object-stores",
        ),
        ("foo://bucket/run", r"foo://bucket/run: fsspec knows no such store \(Protocol not known: foo\)"),
    ],
)
def test_a_missing_package_is_one_line(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    pytest.importorskip("fsspec")
    loaded = vars(sys.modules["fsspec.registry"])["_registry"]  # another test may have loaded gcsfs
    monkeypatch.delitem(loaded, "gs", raising=False)
    with pytest.raises(StoreError, match=message) as error:
        Store(url)
    assert "\n" not in str(error.value)


def test_a_folder_is_uploaded_marker_last(folder: Path, server: FaultyServer) -> None:
    url = f"{server.bucket}/marker"
    server.requests.clear()
    upload(folder, url, MARKER, REPLACED)
    written = [path.partition("/marker/")[2] for method, path in server.requests if method == "PUT"]
    assert written == ["empty.bin", "b.bin", "a.bin", "clusters/index.json", "index.json"]
    (folder / "index.json").write_bytes(b"new")
    (folder / "b.bin").unlink()
    Store(url).write("wiki/c.bin", b"of another corpus")
    server.requests.clear()
    upload(folder, url, MARKER, REPLACED)
    assert Store(url).read("wiki/c.bin") is not None
    Store(url).remove(["wiki/c.bin"])
    removed = [path.partition("/marker/")[2] for method, path in server.requests if method == "DELETE"]
    assert removed[:2] == ["index.json", "clusters/index.json"]
    copy = fetch(url, MARKER)
    assert copy is not None and contents(copy) == contents(folder)


def test_files_are_found_by_pattern(folder: Path, server: FaultyServer, tmp_path: Path) -> None:
    top = f"{server.bucket}/pattern"
    upload(folder, top, MARKER, REPLACED)
    Store(f"{top}/x [1]").write("a[b].bin", b"")
    for number, (url, names) in enumerate(
        {
            "*.bin": ["a.bin", "b.bin", "empty.bin"], "a.bin": ["a.bin"], "x [1]/a[b].bin": ["a[b].bin"],
            "x [1]": ["a[b].bin"],
        }.items()
    ):  # fmt: skip
        found = Store(f"{top}/{url}").get_all(tmp_path / str(number))
        assert found == (f"{top}/x [1]" if url.startswith("x") else top)
        assert sorted(contents(tmp_path / str(number))) == names
    assert Store(top).get_all(tmp_path / "all") == top
    assert contents(tmp_path / "all") == {**contents(folder), "x [1]/a[b].bin": b""}
    with pytest.raises(StoreError, match=f"cannot read {top}/nothing: there is no such file"):
        Store(f"{top}/nothing").get_all(tmp_path / "none")


@pytest.mark.parametrize("kind", ["cut", "broken", "slow"])
def test_a_request_that_breaks_is_made_again(folder: Path, server: FaultyServer, kind: str) -> None:
    server.faults += [Fault(kind, "PUT", "a.bin", times=2), Fault(kind, "GET", "b.bin", times=2)]  # type: ignore[arg-type]
    url = f"{server.bucket}/again-{kind}"
    upload(folder, url, MARKER, REPLACED)
    copy = fetch(url, MARKER)
    assert copy is not None and contents(copy) == contents(folder)
    assert all(fault.seen == 2 for fault in server.faults if kind != "slow")


@pytest.mark.parametrize(("kind", "reason"), [("cut", "Connection|connection|disconnected"), ("full", "507")])
def test_an_interrupted_upload_is_not_there(folder: Path, server: FaultyServer, kind: str, reason: str) -> None:
    url = f"{server.bucket}/interrupted-{kind}"
    upload(folder, url, MARKER, REPLACED)
    server.faults.append(Fault(kind, "PUT", "a.bin"))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=rf"^cannot write a.bin to {url}: .*({reason})") as error:
        upload(folder, url, MARKER, REPLACED)
    assert "\n" not in str(error.value)
    assert fetch(url, MARKER) is None


def test_an_interrupted_copy_goes_on(folder: Path, server: FaultyServer) -> None:
    url = f"{server.bucket}/copy"
    upload(folder, url, MARKER, REPLACED)
    server.faults.append(Fault("broken", "GET", "b.bin"))
    with pytest.raises(StoreError, match=r"cannot read b\.bin of"):
        fetch(url, MARKER)
    assert not (local_copy(url) / MARKER).exists()
    server.faults.clear()
    server.requests.clear()
    copy = fetch(url, MARKER)
    assert copy is not None and contents(copy) == contents(folder)
    assert not any(method == "GET" and path.endswith("/a.bin") for method, path in server.requests)


def save_steps(url: str, *steps: int, **options: object) -> dict[int, torch.Tensor]:
    """Train ALONE, save the ``steps``, and return a weight of each."""
    weights = {}
    with rank_alone():
        engine = engine_of(ALONE)
        for step in range(1, max(steps) + 1):
            one_step(engine, ALONE, step, data_rank=0)
            engine.step()
            if step in steps:
                engine.save_checkpoint(url, **options)
                engine.wait_for_checkpoint()
                weights[step] = next(iter(engine.full_state_dict().values())).clone()
    return weights


def load_weight(url: str, tag: str | None = None) -> tuple[str | None, torch.Tensor]:
    with rank_alone():
        engine = engine_of(ALONE)
        path, _ = engine.load_checkpoint(url, tag)
        return path, next(iter(engine.full_state_dict().values())).clone()


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_saved_loaded_and_pruned(server: FaultyServer, cache: Path, *, background: bool) -> None:
    url = f"{server.bucket}/saved-{background}"
    assert load_weight(url)[0] is None
    weights = save_steps(url, 1, 2, 3, keep=2, background=background)
    assert {name.partition("/")[0] for name in Store(url).sizes()} == {"step-2", "step-3", "latest.json"}
    assert not [name for name in Store(url).sizes() if name.endswith(PARTIAL)]
    path, weight = load_weight(url)
    assert path == str(local_copy(url) / "step-3") and torch.equal(weight, weights[3])
    assert torch.equal(load_weight(url, "step-2")[1], weights[2])
    assert not list(cache.glob("saving-*"))
    with pytest.raises(CheckpointError, match=f"{url}: no complete checkpoint step-1; found: step-2, step-3"):
        load_weight(url, "step-1")


@pytest.mark.parametrize("word", ["__0_0.distcp", "metadata.json", "state.json"])
@pytest.mark.parametrize("kind", ["cut", "full"])
def test_an_interrupted_save_is_never_resumed_from(server: FaultyServer, kind: str, word: str) -> None:
    url = f"{server.bucket}/broken-{kind}-{word}"
    weights = save_steps(url, 1)
    server.faults.append(Fault(kind, "PUT", f"step-2/{word}"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint: cannot write step-2/{word}") as error:
        save_steps(url, 2)
    assert "\n" not in str(error.value)
    path, weight = load_weight(url)
    assert path is not None and path.endswith("step-1") and torch.equal(weight, weights[1])
    with pytest.raises(CheckpointError, match="no complete checkpoint step-2; found: step-1"):
        load_weight(url, "step-2")
    server.faults.clear()
    save_steps(url, 3)
    assert {name.partition("/")[0] for name in Store(url).sizes()} == {"step-1", "step-3", "latest.json"}


def test_a_lost_pointer_and_one_that_names_no_checkpoint(server: FaultyServer) -> None:
    url = f"{server.bucket}/pointer"
    save_steps(url, 1, 2)
    Store(url).remove(["step-2/state.json"])
    assert newest(url) == "step-1"
    Store(url).remove(["latest.json"])
    assert newest(url) == "step-1"
    Store(url).write("latest.json", '{"tag": "../other"}')
    with pytest.raises(CheckpointError, match=r"json: names '\.\./other', .*; remove this file to resume from step-1"):
        newest(url)


def test_a_foreign_folder_is_not_replaced_and_damage_is_found(server: FaultyServer) -> None:
    url = f"{server.bucket}/foreign"
    Store(url).write("step-1/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match="step-1: exists and is not a checkpoint of this engine"):
        save_steps(url, 1)
    assert Store(url).sizes() == {"step-1/notes.txt": 4}
    url = f"{server.bucket}/damaged"
    save_steps(url, 1)
    content = Store(f"{url}/step-1").read("__0_0.distcp")
    assert content is not None
    Store(f"{url}/step-1").write("__0_0.distcp", bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: damaged, its sha256"):
        load_weight(url)


def _in_own_cache(variables: dict[str, str], case: Case, url: str, caches: str, work: str) -> object:
    """Save or load ``case`` as on a host that shares no folder with others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "SDP_CACHE": f"{caches}/{work}-{dist.get_rank()}"}.items():
            patch.setenv(name, value)
        if work == "save":
            return train_and_save(case, url)
        engine = engine_of(case)
        path, client = engine.load_checkpoint(url)
        return engine.full_state_dict(), moments_of(engine), path, client


def test_hosts_share_no_folder(ranks: RankPool, server: FaultyServer, tmp_path: Path) -> None:
    arguments = server.variables(), SOURCE, f"{server.bucket}/hosts", str(tmp_path)
    saved = ranks.run(_in_own_cache, *arguments, "save", world=4)
    loaded = ranks.run(_in_own_cache, *arguments, "load", world=4)
    assert len({answer[2] for answer in loaded}) == 4 and loaded[0][3] == {"note": "kept"}
    assert all(torch.equal(loaded[0][0][name], value) for name, value in saved[0][0].items())
    moments = merge_moments(saved)
    assert all(torch.equal(value, moments[name]) for name, value in merge_moments(loaded).items())
