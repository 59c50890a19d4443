"""The files of a run: written by line, cut at a resume, read after a kill."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import CheckpointError, ConfigError, DataError, WriteError
from sdp.engine.files import PARTIAL, write_whole
from sdp.engine.placement.placement import Placement
from sdp.tests.support.fabricated_runs import make_run
from sdp.tests.support.small_runs import read_metrics
from sdp.tools.cli import main
from sdp.tools.evaluate import Evaluation, as_json
from sdp.tools.runs.plot import plot_loss
from sdp.tools.runs.run_files import RunFiles, read_run
from sdp.tools.runs.saved_run import check_data


def line(step: int, loss: float = 1.0) -> dict[str, float]:
    return {"step": step, "tokens": step * 10, "loss": loss}


def test_what_is_written_is_read(tmp_path: Path):
    files = RunFiles(tmp_path / "a" / "run", resume=False)
    placement = Placement(2, ("u",), ((0, 1),), (3,))
    files.write_config(load_config({"sdp": {"groups": 2}}))
    files.write_placement(placement)
    files.evaluation(line(0))
    files.step(line(1))
    files.summary({"steps": 1})
    run = read_run(tmp_path / "a" / "run")
    assert run.config["sdp"]["groups"] == 2
    assert Placement.from_json(run.placement or {}) == placement
    assert (run.metrics, run.evaluations, run.summary) == ([line(1)], [line(0)], {"steps": 1})
    assert run.name == "run"


def test_a_loss_that_is_nan_stays_valid_json(tmp_path: Path):
    RunFiles(tmp_path, resume=False).step(
        line(1, float("nan")) | {"by": {"x": float("inf")}, "list": [1.0, float("-inf")]}
    )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == line(1) | {
        "loss": None,
        "by": {"x": None},
        "list": [1.0, None],
    }


def test_checkpoints_alone_are_a_run(tmp_path: Path):
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFiles(tmp_path, resume=False)


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(tmp_path: Path):
    RunFiles(tmp_path, resume=False).evaluation(line(0))
    again = RunFiles(tmp_path, resume=False)
    again.write_config({})
    again.evaluation(line(0, 2.0))
    assert read_run(tmp_path).evaluations == [line(0, 2.0)]


def test_a_resumed_run_has_every_step_once(tmp_path: Path):
    make_run(tmp_path, steps=40, finished=False, tail='{"step": 21, "tok')
    files = RunFiles(tmp_path, resume=True)
    files.truncate_after(15)
    for step in range(16, 19):
        files.step(line(step))
    run = read_run(tmp_path)
    assert [entry["step"] for entry in run.metrics] == list(range(1, 19))
    assert [entry["step"] for entry in run.evaluations] == [0, 10]


def test_a_resumed_run_has_no_summary_until_it_ends(tmp_path: Path):
    assert make_run(tmp_path).summary is not None
    RunFiles(tmp_path, resume=True).truncate_after(40)
    assert read_run(tmp_path).summary is None


def test_resuming_in_a_new_directory_starts_a_run(tmp_path: Path):
    files = RunFiles(tmp_path / "new", resume=True)
    files.truncate_after(0)
    files.write_config({})
    assert read_run(tmp_path / "new").metrics == []


@pytest.mark.parametrize("tail", ['{"step": 21, "tok', '{"step": 21', "\x00\x00\x00", '"step"', "{}"])
def test_a_cut_last_line_is_left_out(tmp_path: Path, tail: str):
    run = make_run(tmp_path, steps=40, finished=False, tail=tail)
    assert [entry["step"] for entry in run.metrics] == list(range(1, 21))
    assert run.summary is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_line_without_end_is_not_read_whole(tmp_path: Path, name: str):
    """A sparse file of some gigabytes would take all memory."""
    make_run(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.truncate(file.tell() + (1 << 40))
    with pytest.raises(DataError, match=rf"{name}:\d+: not a line of a run \(it is longer than 16 MiB\); remove this"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n',
            r"metrics.jsonl:2: not a line of a run \(.*\); remove this line"),
        ("config.json", "{", r"config.json: cannot be read \(.*\); the file is damaged"),
        ("summary.json", "[1]", "summary.json: a JSON object is expected, not list; the file is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str):
    make_run(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as error:
        read_run(tmp_path)
    assert "\n" not in str(error.value)


def test_a_directory_without_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not the directory of a run \(no config.json in it\); give the --dump-dir"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        read_run(tmp_path / "missing")


def test_a_dump_dir_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--dump-dir .*: cannot be written"):
        RunFiles(tmp_path / "file" / "run", resume=False)


def test_a_directory_that_was_removed_is_noticed_at_the_next_line(tmp_path: Path):
    files = RunFiles(tmp_path / "run", resume=False)
    files.step(line(1))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(WriteError, match=r"metrics\.jsonl: was removed while the run was writing to it"):
        files.step(line(2))
    with pytest.raises(WriteError, match=r"evaluations\.jsonl: cannot be written"):
        files.evaluation(line(2))
    files.close()


NAMES = [
    "metrics.jsonl", "evaluations.jsonl", "config.json", "placement.json", "summary.json", ".lock", "checkpoints",
    "logs",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_dump_directory_is_refused(tmp_path: Path, name: str):
    run, target = tmp_path / "run", tmp_path / "precious"
    target.write_text("kept")
    run.mkdir()
    (run / name).symlink_to(target)
    with pytest.raises(WriteError, match=rf"{name}: is a symbolic link, which a run does not follow; remove the link"):
        RunFiles(run, resume=False)
    assert target.read_text() == "kept"
    assert (run / name).is_symlink()


@pytest.mark.parametrize("kind", ["fifo", "directory"])
@pytest.mark.parametrize("name", NAMES[:6])
def test_what_is_not_a_regular_file_is_refused_without_a_hang(tmp_path: Path, name: str, kind: str):
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / name) if kind == "fifo" else (run / name).mkdir()
    with pytest.raises(
        WriteError, match=rf"{name}: is not a regular file, and a run must write a file of this name; remove it"
    ):
        RunFiles(run, resume=True)


def test_a_draft_that_was_left_behind_is_removed(tmp_path: Path):
    (tmp_path / "target").write_text("kept")
    for make in (os.mkfifo, lambda draft: draft.symlink_to(tmp_path / "target"), Path.touch):
        make(tmp_path / f".config.json{PARTIAL}")
        write_whole(tmp_path / "config.json", "new")
        assert (tmp_path / "config.json").read_text() == "new"
    assert (tmp_path / "target").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "target"}


def test_a_dump_directory_may_itself_be_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    RunFiles(tmp_path / "link" / "run", resume=False).step(line(1))
    RunFiles(tmp_path / "link", resume=False).step(line(1))
    assert read_metrics(tmp_path / "real") == read_metrics(tmp_path / "real" / "run") == [line(1)]


# -- files of a run whose values have wrong types are refused in one line --------------------------

STATES: dict[str, Any] = {"state_measured": {}, "state_predicted": {}}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"model": 3}),
    ("config.json", {"model": {"name": []}}),
    ("config.json", {"sdp": []}),
    ("config.json", {"training": {"steps": "many"}}),
    ("placement.json", {"holders": "x"}),
    ("placement.json", {"costs": [1.5] * 8}),
    ("placement.json", {"costs": [1]}),
    ("placement.json", {"costs": [-1] * 8}),
    ("placement.json", {"groups": 10**30}),
    ("placement.json", {"holders": [[9]] * 8}),
    ("summary.json", {"ranks": {"a": 1}}),
    ("summary.json", {"ranks": [None]}),
    ("summary.json", {"ranks": [STATES | {"peak_memory_bytes": 1, "baseline_memory_bytes": "x"}]}),
    ("summary.json", {"ranks": [STATES | {"state_measured": []}]}),
    ("summary.json", {"ranks": [{}]}),
    ("summary.json", {"model": 1.5}),
    ("summary.json", {"model": {"name": "llama"}}),
    ("summary.json", {"layout": []}),
    ("summary.json", {"held_out": "x"}),
    ("summary.json", {"dense_state_bytes": {"parameters": 1e308}}),
    ("summary.json", {"tokens": [1]}),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=str)
def test_a_wrong_value_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: dict[str, Any]
) -> None:
    make_run(tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | change))
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"sdp: error: {tmp_path / name}: damaged, or of another version: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", "x"), ("loss", [1.0]), ("tokens", -1), ("subnetwork_losses", "abc"),
     ("comm_bytes_by_kind", [1]), ("step", -1)],
)  # fmt: skip
def test_a_wrong_value_in_a_line_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    make_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {key: value})
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: not a line of a run \('.*remove this line"):
        read_run(tmp_path)


def test_a_line_without_tokens_or_loss_can_be_plotted(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 10, "loss": 3.0}\n')
    assert plot_loss([read_run(tmp_path)], tmp_path / "loss.png").is_file()


def test_a_loss_that_is_nan_is_null_in_the_json_of_an_evaluation() -> None:
    result = Evaluation("c", 1, "d", 1, 1, 1, float("nan"), float("inf"), None, None)
    assert json.loads(as_json(result), parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize(
    "client_state",
    [{"images": 5}, {"images": {}}, {"images": {"name": "digits"}}, {"tokenizer": 5}, {"tokenizer": ["kind"]}],
    ids=str,
)
def test_a_client_state_that_does_not_describe_the_data_is_refused(
    tmp_path: Path, client_state: dict[str, Any]
) -> None:
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-4: damaged, its client state does not describe the data"):
        check_data(Path("step-4"), {"client_state": client_state}, tmp_path, "digits")
