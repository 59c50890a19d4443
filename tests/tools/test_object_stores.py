"""Runs whose data, checkpoints and exports are in an object store."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdp.engine import object_store
from sdp.engine.object_store import Store
from sdp.tests.support.foreign.object_stores import Fault, FaultyServer, faulty_server
from sdp.tests.support.small_runs import make_corpus, read_losses, read_metrics, run_sdp, tiny_config, write_config


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[FaultyServer]:
    with faulty_server(getattr(request, "param", "s3")) as server:
        yield server


@pytest.fixture
def server(running: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, value in {**running.variables(), "SDP_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)
    yield running
    running.faults.clear()


@pytest.fixture
def config(server: FaultyServer, tmp_path: Path) -> Path:
    """The configuration of a small run that reads a corpus in the store."""
    url = f"{server.bucket}/corpus"
    if Store(url).read("index.json") is None:
        (tmp_path / "made").mkdir()
        make_corpus(tmp_path / "made")
        for text in (tmp_path / "made").glob("*.txt"):
            Store(f"{server.bucket}/raw").put(text, text.name)
        words = ["--input", f"{server.bucket}/raw/*.txt", "--output", url, "--tokenizer", "bytes"]
        prepared = run_sdp("prepare", *words, "--held-out", "0.2")
        assert prepared.returncode == 0, prepared.stderr
        index = json.loads(Store(url).read("index.json") or b"")
        there = json.loads((tmp_path / "made/shards/index.json").read_bytes())
        assert index["corpus"]["sha256"] == there["corpus"]["sha256"]
        assert index["corpus"]["sources"] == [f"{server.bucket}/raw/*.txt"]
    settings = tiny_config(Path("unused"), groups=2, steps=4)
    settings["data"]["path"] = url
    settings["training"] |= {"save_every": 2, "keep": 2, "evaluate_every": 2}
    return write_config(settings, tmp_path)


def local_losses(config: Path, tmp_path: Path) -> list[float]:
    """The losses of the same run without an object store."""
    done = run_sdp("train", config, "--dump-dir", tmp_path / "local")
    assert done.returncode == 0, done.stderr
    return read_losses(tmp_path / "local")


def test_a_run_goes_on_on_another_host(config: Path, server: FaultyServer, tmp_path: Path) -> None:
    url = f"{server.bucket}/run"
    first = run_sdp("train", config, "--dump-dir", url, "--set", "training.steps=2")
    assert first.returncode == 0, first.stderr
    refused = run_sdp("train", config, "--dump-dir", url)
    message = f"sdp: error: {url} already holds a run; pass --resume to continue it or name another --dump-dir\n"
    assert (refused.returncode, refused.stderr) == (2, message)
    shutil.rmtree(tmp_path / "cache")  # as on another host
    second = run_sdp("train", config, "--dump-dir", url, "--resume")
    assert second.returncode == 0, second.stderr
    assert "training: steps 3 to 4" in second.stderr
    assert read_losses(tmp_path / "cache/runs" / url.replace("://", "/")) == local_losses(config, tmp_path)
    files = Store(url).sizes()
    assert {"config.json", "metrics.jsonl", "summary.json", "checkpoints/step-4/state.json"} <= files.keys()

    shutil.rmtree(tmp_path / "cache")  # as on another host
    evaluated = run_sdp("evaluate", url, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads(evaluated.stdout)
    assert result["step"] == 4 and result["loss"] == pytest.approx(result["in_training"], rel=1e-5)

    assert json.loads(run_sdp("report", url, "--json").stdout)["runs"]
    assert run_sdp("export", url, f"{server.bucket}/models/a").returncode == 0
    assert {"config.json", "model.safetensors"} <= Store(f"{server.bucket}/models/a").sizes().keys()
    assert f"{server.bucket}/models/a: exists already" in run_sdp("export", url, f"{server.bucket}/models/a").stderr
    assert run_sdp("export", url, f"{server.bucket}/models/a", "--overwrite").returncode == 0
    assert "models: has files that are not" in run_sdp("export", url, f"{server.bucket}/models", "--overwrite").stderr


@pytest.mark.parametrize("running", ["gs"], indirect=True)
def test_data_that_a_run_prepares_is_copied_too(server: FaultyServer, tmp_path: Path) -> None:
    url = f"{server.bucket}/prepares"
    settings = tiny_config(Path("unused"), groups=1, steps=1)
    settings["data"] = {"tokenizer": "bytes", "sequence_length": 16}
    settings["training"] |= {"save_every": 1}
    config = write_config(settings, tmp_path)
    assert run_sdp("train", config, "--dump-dir", url).returncode == 0
    shutil.rmtree(tmp_path / "cache")  # as on another host
    evaluated = run_sdp("evaluate", url, "--batches", "1")
    assert evaluated.returncode == 0, evaluated.stderr
    second = run_sdp("train", config, "--dump-dir", url, "--resume", "--set", "training.steps=2")
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "cache/runs" / url.replace("://", "/"))] == [1, 2]


def test_a_run_outlives_a_store_that_is_full_for_a_while(config: Path, server: FaultyServer, tmp_path: Path) -> None:
    url = f"{server.bucket}/full"
    server.faults.append(Fault("full", "PUT", "full/checkpoints/step-2/__0"))
    done = run_sdp("train", config, "--dump-dir", url)
    assert done.returncode == 0, done.stderr
    assert "WARNING: no checkpoint at step 2: cannot write the checkpoint: cannot write step-2/__0" in done.stderr
    assert read_losses(tmp_path / "cache/runs" / url.replace("://", "/")) == local_losses(config, tmp_path)
    assert [name for name in Store(url).sizes() if "step-2" in name] == []


def test_a_store_that_stays_full_ends_the_run_with_one_line(config: Path, server: FaultyServer) -> None:
    server.faults.append(Fault("full", "PUT", "never/checkpoints"))
    done = run_sdp("train", config, "--dump-dir", f"{server.bucket}/never", "--set", "training.max_failed_saves=2")
    assert done.returncode == 2
    assert "the last 2 checkpoints could not be written" in done.stderr.splitlines()[-1]


def test_missing_data(config: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_sdp("prepare", "--verify", "--output", f"{server.bucket}/corpus").returncode == 0
    done = run_sdp("train", config, "--set", f"data.path={server.bucket}/nothing")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{server.bucket}/nothing: no prepared data here (no index.json); make it with: sdp prepare" in done.stderr
    for command in (["evaluate", f"{server.bucket}/nothing"], ["export", f"{server.bucket}/nothing", "out"]):
        done = run_sdp(*command)
        assert done.returncode == 2 and f"{server.bucket}/nothing: no run of sdp train here" in done.stderr
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    done = run_sdp("train", config, "--dump-dir", f"{server.bucket}/own", "--set", "data.path=null")
    assert done.returncode == 2 and "a run on several hosts cannot prepare data in this folder" in done.stderr
