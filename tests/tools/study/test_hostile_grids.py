"""``sdp study``: grids that cannot run, folders of others, and files of an earlier study."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.errors import ConfigError, SDPError
from sdp.tools.cli import main
from sdp.tools.shared.files import WriteError
from sdp.tools.study.grid import report
from sdp.tools.study.grid_file import GridRun, first_runs, read_grid
from sdp.tools.study.runs import figures_of, prepared_data, read_own, remove_run, run_one

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
              "num_attention_heads": 2},
    "data": {"sequence_length": 8, "tokenizer": "bytes"},
    "training": {"steps": 10},
}  # fmt: skip
GRID: dict[str, Any] = {"title": "Rates", "base": BASE, "rows": {"a": {}}, "columns": {"b": {}}}
MANY = list(range(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 10**9}, "seeds: input should be less than or equal to 1000"),
        ({"seeds": 10**30}, "seeds: "),
        ({"tune": {f"optimizer.params.{key}": MANY for key in "abcdef"}}, "1,000,000,000,002 runs, and a grid may"),
        ({"rows": {str(row): {} for row in range(4000)}}, "12,000 runs, and a grid may have 10,000"),
        ({"tune_seeds": 4}, "tune_seeds: 4 is more than the "),
        ({"tune": {"optimizer.params.lr": []}}, "tune.optimizer.params.lr: list should have at least 1 item"),
        ({"rows": {"a" * 300: {}}}, "its directory's name would have 308 characters, and 200 fit"),
        ({"rows": {"a b": {}, "a_b": {"sdp.groups": 1}}}, "its directory would be a_b-b-seed0, as that of a b, b"),
        ({"base": BASE | {"training": [1]}}, "training: "),
        ({"base": BASE | {"training": "x"}}, "training: "),
        ({"base": BASE | {"data": "x"}}, "data: "),
        ({"rows": {"a": {"data": 1}}}, "data: "),
        ({"rows": {"a": {"optimizer.params.wieght": 1}}}, "a, b: optimizer.params.wieght: unknown key"),
        ({"rows": {"\x1b[31m": {"sdp.groups": 0}}}, "\\x1b[31m, b: sdp.groups: "),
        ({"rows": {"a": {"": 1}}}, "a, b: "),
        ({"rows": {"a": {"title.x": 1}}}, "a, b: title: unknown key"),
        ({"skip": [["a", "b"]]}, "skip: leaves no cell"),
        ({"title": 3}, "title: "),
        ({"more": 3}, "more: unknown key"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grid_that_cannot_run_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(GRID | change))
    assert main(["study", "grid", str(path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sdp: error: ") and error.count("\n") == 1 and message in error and "\x1b" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("study", [["grid", "grid.json", "out"], ["profiles", "out"], ["memory", "out"]], ids=str)
def test_an_output_that_is_a_file_is_one_line(
    study: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.json").write_text(json.dumps(GRID))
    Path("out").write_text("a file")
    assert main(["study", *study]) == 2
    assert capsys.readouterr().err == "sdp: error: out: cannot be made a folder (File exists); name another one\n"


def refuse(_config: Path, _folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "refused")


def the_run(tmp_path: Path) -> GridRun:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(GRID))
    return first_runs(read_grid(path))[0]


def test_a_directory_that_no_study_made_is_not_removed(tmp_path: Path) -> None:
    run = the_run(tmp_path)
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "mine").write_text("mine")
    with pytest.raises(ConfigError, match=r"a-b-seed0: exists, and this study did not make it; move it"):
        run_one(run, tmp_path, None, refuse)
    assert (tmp_path / run.name / "mine").read_text() == "mine"
    (tmp_path / "first").mkdir()
    with pytest.raises(ConfigError, match=r"first: exists, and this study did not make it"):
        prepared_data(run.config(None), tmp_path)


def test_a_run_that_was_cut_off_is_removed_and_starts_again(tmp_path: Path) -> None:
    run = the_run(tmp_path)
    assert run_one(run, tmp_path, None, refuse) == "a-b-seed0: refused"
    (tmp_path / run.name).mkdir()
    assert run_one(run, tmp_path, None, refuse) == "a-b-seed0: refused"
    assert not (tmp_path / run.name).exists()


@pytest.mark.parametrize("name", ["a-b-seed0.json", "a-b-seed0.json.partial", "a-b-seed0"])
def test_a_link_in_the_folder_of_a_study_is_not_followed(name: str, tmp_path: Path) -> None:
    run, victim = the_run(tmp_path), tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (tmp_path / name).symlink_to(victim if name == "a-b-seed0" else victim / "file")
    with pytest.raises(SDPError, match=r"symbolic link|did not make it"):
        run_one(run, tmp_path, None, refuse)
    assert (victim / "file").read_text() == "mine"


@pytest.mark.parametrize("is_dangling", [False, True])
def test_each_check_for_a_link_is_enough(tmp_path: Path, is_dangling: bool) -> None:
    victim = tmp_path / "victim"
    if not is_dangling:
        victim.mkdir()
        (victim / "file").write_text("mine")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "link.json").symlink_to(victim / "file")
    with pytest.raises(ConfigError, match="exists, and this study did not make it"):
        remove_run(tmp_path / "link", "{}")
    with pytest.raises(WriteError, match="symbolic link"):
        read_own(tmp_path / "link.json")
    assert is_dangling or (victim / "file").read_text() == "mine"


def test_a_held_out_loss_that_is_nan_is_infinite_in_the_table(tmp_path: Path) -> None:
    run = the_run(tmp_path)
    folder = tmp_path / run.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (folder / name).write_text('{"step": 10, "loss": null}\n')
    (folder / "summary.json").write_text("{}")
    found = figures_of([run], tmp_path)
    assert found is not None and found["mean"] == float("inf") and found["spread"] is None
    assert "| inf" in report(run.grid, tmp_path)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"llama": 3}', '{"llama": {"x": 3}}', '{"llama": {"x": {}}}', '{"llama": {"x": {"error": 1}}}'],
)
def test_a_damaged_table_of_memory_is_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory.json").write_text(content)
    assert main(["study", "memory", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "memory.json: not the JSON of an earlier table" in error and error.count("\n") == 1
