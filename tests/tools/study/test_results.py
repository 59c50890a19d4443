"""``results.json`` of a study: another machine goes on from it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, SDPError
from sdp.tests.support.processes import until
from sdp.tools.study import runs
from sdp.tools.study.differences import differences_from
from sdp.tools.study.grid import figures, run_times
from sdp.tools.study.grid_file import first_runs, read_grid
from sdp.tools.study.results import RESULTS, SavedResults, config_digest, corpus_digest
from sdp.tools.study.runs import run_all, run_one

ROOT = Path(__file__).parents[3]
GRID: dict[str, Any] = {
    "title": "Rates",
    "seeds": 1,
    "base": {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                  "num_attention_heads": 2},
        "data": {"sequence_length": 8, "tokenizer": "bytes"},
        "training": {"steps": 10},
    },
    "rows": {"a": {}},
    "columns": {"b": {}, "c": {"training.steps": 20}},
}  # fmt: skip


@pytest.fixture
def grid_file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(GRID))
    return path


def _corpus(folder: Path, shard: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps({"version": 1, "splits": {"train": shard}}))
    return folder


def _train(trained: list[str], loss: float | None = 2.5) -> runs.Train:
    """A training that writes what a finished run leaves, and notes the run."""

    def train(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        trained.append(folder.name)
        folder.mkdir()
        step = json.loads(config.read_text())["training"]["steps"]
        line = json.dumps({"step": step, "loss": loss}) + "\n"
        (folder / "config.json").write_text(config.read_text())
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            (folder / name).write_text(line)
        (folder / "summary.json").write_text(json.dumps({"seconds": 90.0}))
        return subprocess.CompletedProcess([], 0, "", "")

    return train


def _run(path: Path, out: Path, data: Path, monkeypatch: pytest.MonkeyPatch, loss: float | None = 2.5) -> list[str]:
    """Run the grid's first runs, and return the names of those that were trained."""
    trained: list[str] = []
    train = _train(trained, loss)
    monkeypatch.setattr(runs, "run_one", lambda run, out, data: run_one(run, out, data, train))
    out.mkdir(exist_ok=True)
    assert not list(run_all(first_runs(read_grid(path)), out, data, 1))
    return trained


def test_another_machine_goes_on_from_the_file_alone(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    both = ["a-b-seed0", "a-c-seed0"]
    assert _run(grid_file, here, _corpus(tmp_path / "corpus", "x"), monkeypatch) == both
    before = figures(read_grid(grid_file), here)

    there.mkdir()
    (there / RESULTS).write_text((here / RESULTS).read_text())
    elsewhere = _corpus(tmp_path / "elsewhere" / "corpus", "x")
    assert _run(grid_file, there, elsewhere, monkeypatch) == []
    assert figures(read_grid(grid_file), there) == before
    saved = SavedResults.read(here)
    assert saved is not None
    assert {(run.loss, run.least, run.seconds) for run in saved.runs.values()} == {(2.5, 2.5, 90.0)}
    assert run_times(read_grid(grid_file), there) == [90.0, 90.0], "from the file alone"

    changed = GRID | {"columns": {"b": {"optimizer.params.lr": 0.2}, "c": {"training.steps": 20}}}
    grid_file.write_text(json.dumps(changed))
    assert _run(grid_file, there, elsewhere, monkeypatch, 2.0) == ["a-b-seed0"], "only what changed is repeated"
    assert [cell["mean"] for cell in figures(read_grid(grid_file), there)] == [2.0, 2.5]


def test_a_run_with_a_nan_loss_is_remembered_as_infinite(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, corpus = tmp_path / "out", _corpus(tmp_path / "corpus", "x")
    _run(grid_file, out, corpus, monkeypatch, None)
    saved = SavedResults.read(out)
    assert saved is not None and saved.runs["a-b-seed0"].loss is None
    assert saved.runs["a-b-seed0"].numbers()["loss"] == float("inf")


def test_a_schedule_of_maskings_may_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that prepares the corpus has one step, and a schedule needs more."""

    def train(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        load_config(json.loads(config.read_text()))
        _corpus(folder / "corpus", "digest")
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(runs, "start_training", train)
    schedule = [{"until": 0.5, "masking": "forward"}, {"masking": "backward"}]
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(GRID | {"rows": {"a": {"sdp": {"groups": 2, "capacity": 0.5, "masking": schedule}}}}))
    run = first_runs(read_grid(path))[0]
    assert runs.prepared_data(run.config(None), tmp_path) == tmp_path / "corpus"
    assert run.config(None)["sdp"]["masking"] == schedule


def test_results_of_another_corpus_are_refused(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _run(grid_file, out, _corpus(tmp_path / "corpus", "x"), monkeypatch)
    kept = (out / RESULTS).read_text()
    with pytest.raises(ConfigError, match="learned from another corpus"):
        _run(grid_file, out, _corpus(tmp_path / "other", "y"), monkeypatch)
    assert (out / RESULTS).read_text() == kept


@pytest.mark.parametrize("text", ["", "[]", "{", '{"corpus": 1, "runs": {}}', '{"corpus": null, "runs": {"a": {}}}'])
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(ConfigError) as raised:
        SavedResults.read(tmp_path)
    assert "is not a file of sdp study" in str(raised.value) and "\n" not in str(raised.value)


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / RESULTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SDPError, match="symbolic link"):
        SavedResults.read(tmp_path)


def test_digests_know_the_settings_and_the_text_but_not_the_place(tmp_path: Path) -> None:
    config = {"data": {"path": "/a", "sequence_length": 8}, "training": {"steps": 1}}
    moved = config | {"data": {"path": "/b", "sequence_length": 8}}
    assert config_digest(config) == config_digest(moved) != config_digest(config | {"training": {"steps": 2}})
    first, second = _corpus(tmp_path / "a", "x"), _corpus(tmp_path / "b", "x")
    assert corpus_digest(first) == corpus_digest(second) != corpus_digest(_corpus(tmp_path / "c", "y"))
    assert corpus_digest(None) is None
    with pytest.raises(ConfigError, match="is not a corpus"):
        corpus_digest(tmp_path / "nowhere")


def test_sigterm_ends_the_runs_of_a_study(grid_file: Path, tmp_path: Path) -> None:
    grid_file.write_text(json.dumps(GRID | {"base": GRID["base"] | {"training": {"steps": 10**6}}}))
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "sdp", "study", "grid", str(grid_file), str(out), "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as study:
        lines = [out / name / "metrics.jsonl" for name in ("a-b-seed0", "a-c-seed0")]
        until(lambda: any(path.exists() and path.stat().st_size for path in lines), 240)
        study.terminate()
        assert study.wait(60) == 128 + signal.SIGTERM
    until(lambda: not _arguments_with(out), 60)


def _arguments_with(folder: Path) -> list[bytes]:
    """The command lines of processes that name ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            found.append(path.read_bytes())
    return [line for line in found if bytes(folder) in line]


@pytest.mark.parametrize("name", ["workers", "workers_many", "sizes", "lengths_small"])
def test_the_committed_differences_are_those_of_the_committed_cells(name: str) -> None:
    figures = json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())
    grid = json.loads((ROOT / "configs" / "studies" / f"{name}.json").read_text())
    expected = differences_from(grid["compare_with"], figures["cells"])
    assert len(figures["differences"]) == len(expected) > 0
    for ours, theirs in zip(figures["differences"], expected, strict=True):
        assert ours == pytest.approx(theirs), ours
