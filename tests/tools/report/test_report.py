"""The table that compares runs with the dense model, and the plot beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sdp.tests.support.fabricated_runs import MIB, make_run
from sdp.tools.cli import main
from sdp.tools.report.render import as_json, render
from sdp.tools.runs.plot import plot_loss
from sdp.tools.runs.run_files import Run, read_run


def row(table: str, label: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.strip().startswith(label))
    return re.split(r"\s{2,}", line.strip().removeprefix(label).strip())


@pytest.fixture
def half(tmp_path: Path) -> Run:
    return make_run(tmp_path / "half", holders=2)


@pytest.fixture
def dense(tmp_path: Path) -> Run:
    return make_run(tmp_path / "dense", holders=4)


def test_one_run_is_compared_with_the_prediction(half: Run):
    table = render([half])
    assert table.splitlines()[0].split() == ["half", "dense,", "predicted"]
    assert row(table, "layout") == ["sdp 4 × fsdp 1"]
    assert row(table, "capacity") == ["0.50"]
    assert row(table, "full model, before") == ["8.5000"]
    assert row(table, "full model, after") == ["3.5916"]
    assert row(table, "mean of subnetworks, after") == ["3.9416"]
    assert row(table, "tokens/s") == ["8,000"]
    assert row(table, "parameters") == ["12.00 MiB 0.50×", "24.00 MiB"]
    assert row(table, "optimizer state") == ["24.00 MiB 0.50×", "48.00 MiB"]
    assert row(table, "counted against predicted") == ["equal"]
    assert row(table, "peak of live tensors ¹") == ["80.00 MiB"]
    assert row(table, "peak of resident memory ²") == ["100.0–103.0 MiB"]
    assert row(table, "all collectives") == ["10.00 MB 0.26×", "37.75 MB"]
    assert row(table, "between groups, all-reduce") == ["10.00 MB"]
    assert row(table, "per second") == ["20.00 MB/s"]
    assert "dense model, predicted" in table
    assert f"files  {half.path}" in table


def test_rates_scaled_by_holders_are_named(tmp_path: Path):
    """Two units of 3,000 parameters with one and four holders: the mean is 2.5."""
    run = make_run(tmp_path / "scaled", holders=2)
    run.config["sdp"]["lr_scale"] = "auto"
    run.config["optimizer"] = {"type": "AdamW"}
    run.placement.update(units=["a", "b"], holders=[[1], [0, 1, 2, 3]], costs=[3000, 3000], flops=[])
    assert row(render([run]), "learning rate factors of units") == ["0.63 to 1.26"]
    run.config["optimizer"] = {"type": "SGD"}
    assert row(render([run]), "learning rate factors of units") == ["0.40 to 1.60"]
    run.config["sdp"]["lr_scale"] = "none"
    assert "rates of units" not in render([run])


def test_the_share_of_the_peak_has_the_sustained_rate_next_to_it(half: Run):
    assert "MFU" not in render([half]), "unknown on a CPU"
    lines = [json.loads(line) for line in (half.path / "metrics.jsonl").read_text().splitlines()]
    known = ({**line, "mfu": 0.53, "flops_per_second": 524.4e12} for line in lines)
    (half.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in known))
    table = render([read_run(half.path)])
    assert row(table, "MFU, of the data sheet's dense peak") == ["53.0%"]
    assert row(table, "sustained by a device") == ["524.4 TFLOP/s"]


def test_a_dense_run_is_the_measured_baseline_and_the_last_column(half: Run, dense: Run):
    table = render([dense, half])
    assert table.splitlines()[0].split() == ["half", "dense"]
    assert row(table, "full model, after") == ["3.5916 +0.5000", "3.0916"]
    assert row(table, "tokens/s") == ["8,000", "4,000"]  # no ratio: the runs were not interleaved
    assert row(table, "parameters") == ["12.00 MiB", "0.50×", "24.00 MiB"]
    assert row(table, "peak of live tensors ¹") == ["80.0 MiB", "0.50×", "160.0 MiB"]
    assert row(table, "all collectives") == ["10.00 MB", "0.50×", "20.00 MB"]
    assert "predicted:" not in table and "against the dense run dense, measured" in table


def test_a_killed_run_is_reported_as_far_as_it_went(tmp_path: Path):
    table = render([make_run(tmp_path / "killed", finished=False, tail='{"step": 21')])
    assert row(table, "steps") == ["20 of 40"]
    assert row(table, "all collectives") == ["10.00 MB"]
    assert row(table, "full model, after")[0] == "4.1767"
    assert "memory per rank\n" not in table
    assert "killed is unfinished" in table


def test_a_run_killed_before_its_first_step(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=0, finished=False)
    assert row(render([run]), "tokens") == ["0"]
    (tmp_path / "run" / "evaluations.jsonl").unlink()
    assert "unfinished" in render([read_run(tmp_path / "run")])


def test_deviations_of_the_state_are_shown(tmp_path: Path):
    run = make_run(tmp_path / "run")
    assert run.summary is not None
    run.summary["ranks"][1]["state_measured"] = run.summary["ranks"][1]["state_measured"] | {"gradients": 13 * MIB}
    run.summary["ranks"][1]["comm_bytes_per_step"] = {
        "between groups/all_reduce": 11_000_000,
        "inside groups/all_gather": 1,
    }
    table = render([run])
    assert row(table, "gradients") == ["12.00–13.00 MiB 0.54×", "24.00 MiB"]
    assert row(table, "counted against predicted") == ["+8.33%"]
    assert row(table, "inside groups, all-gather") == ["1 B"]


def test_activations_between_tensor_parallel_ranks_are_shown(tmp_path: Path):
    run = make_run(tmp_path / "run")
    assert run.summary is not None
    for rank in run.summary["ranks"]:
        rank["comm_bytes_per_step"] = rank["comm_bytes_per_step"] | {"tensor parallel/all_gather": 3_000_000}
    table = render([run])
    assert row(table, "tensor parallel, all-gather") == ["3.00 MB"]


def test_the_text_fits_into_100_columns(tmp_path: Path):
    runs = [make_run(tmp_path / f"capacity-{holders}", holders=holders) for holders in (1, 2, 3, 4)]
    table = render(runs)
    assert max(len(line) for line in table.splitlines() if not line.startswith("files")) <= 100
    headers = [
        line.split()
        for line in table.splitlines()
        if "capacity-4" in line and "against" not in line and "files" not in line
    ]
    assert headers == [["capacity-1", "capacity-2", "capacity-4"], ["capacity-3", "capacity-4"]]


def test_json_has_plain_numbers(half: Run, dense: Run):
    report = json.loads(json.dumps(as_json([half, dense])))
    assert report["dense"]["run"] == "dense" and report["dense"]["measured"] is True
    assert report["runs"][0]["state"]["parameters"] == {"smallest": 12 * MIB, "largest": 12 * MIB}
    assert report["runs"][0]["peak_tensors"]["largest"] == 80 * MIB


def test_the_command(half: Run, dense: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "pictures" / "all.png"
    assert main(["report", str(half.path), str(dense.path), "--markdown", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "| &nbsp;&nbsp;parameters | 12.00 MiB (0.50×) | 24.00 MiB |" in out
    assert picture.is_file()
    assert main(["report", str(half.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "half"


def test_a_bar_in_the_name_of_a_run_ends_no_cell(half: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    half.path.rename(named := tmp_path / "a|b")
    assert main(["report", str(named), "--markdown"]) == 0
    heading, below, *_ = capsys.readouterr().out.splitlines()
    assert "a\\|b" in heading
    assert heading.replace("\\|", "").count("|") == below.count("|")


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_plot_is_a_picture_and_the_report_names_it(half: Run, dense: Run, tmp_path: Path):
    assert png_size(plot_loss([half], half.path / "plots" / "loss.png")) == (1600, 1000)
    assert png_size(plot_loss([half, dense], tmp_path / "both.png")) == (1600, 1000)
    assert f"plot   {half.path / 'plots' / 'loss.png'}" in render([half])


def test_losses_that_were_nan_leave_their_cells_empty(half: Run, tmp_path: Path):
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [json.loads(line) for line in (half.path / name).read_text().splitlines()]
        lines[-1]["loss"] = None
        if "subnetwork_losses" in lines[-1]:
            lines[-1]["subnetwork_losses"] = [None, *lines[-1]["subnetwork_losses"][1:]]
        (half.path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = read_run(half.path)
    table = render([run])
    assert row(table, "full model, before") == ["8.5000"]
    assert "full model, after" not in table and "mean of subnetworks, after" not in table
    assert as_json([run])["runs"][0]["subnetworks_after"] is None
    assert plot_loss([run], tmp_path / "loss.png").is_file()


@pytest.mark.parametrize(
    "name", ["x$\\foo$", "a$b", "$", "e\x1b[31mred", "two\nlines", "su\udcffr", "r\u202etl"], ids=ascii
)
def test_the_name_of_a_run_is_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    """It is no formula in a plot, and cannot change a terminal."""
    for path in (tmp_path / name, tmp_path / "other"):
        make_run(path, holders=2)
    words = [str(tmp_path / name), str(tmp_path / "other")]
    for runs in (words[:1], words):
        assert main(["report", *runs, "--plot", str(tmp_path / "plot.png")]) == 0
        printed = capsys.readouterr().out
        assert name.encode("unicode_escape").decode().replace("\\\\", "\\") in printed
        assert not set(printed) & {"\x1b", "\udcff", "\u202e"}
    assert (tmp_path / "plot.png").is_file()
