"""``sdp bench CONFIG --workers``: a run for each number of workers, and what they say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.errors import ConfigError, PlacementError
from sdp.tools.bench.options import MethodOptions
from sdp.tools.bench.workers import parse_counts, run, tabulate


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    path.write_text(CONFIG)
    return path


def report(speeds: dict[str, float], over: dict[str, float]) -> dict[str, Any]:
    methods = {
        name: {"tokens_per_second": speed, "seconds": {"median": 1.0}, "sent_bytes": None}
        | ({"speed_over_ddp": over[name]} if name in over else {})
        for name, speed in speeds.items()
    }
    return {"settings": {"config": "a.json", "tokens_per_sample": 16}, "races": [{"link": "1gbit", "methods": methods}]}


CONFIG = '{"train_micro_batch_size_per_gpu": 1}'
REPORTS = {
    2: report({"ddp": 100.0, "sdp": 200.0}, {"ddp": 1.0, "sdp": 2.0}),
    4: report({"ddp": 150.0, "sdp": 400.0, "hsdp": 80.0}, {}),
}


def test_efficiency_is_of_a_worker_beside_the_fewest() -> None:
    rows = tabulate(REPORTS, 0)
    assert rows["ddp"][4]["efficiency"] == pytest.approx(0.75)
    assert rows["sdp"][4]["efficiency"] == pytest.approx(1.0)
    assert rows["sdp"][2]["speed_over_ddp"] == 2.0
    assert rows["hsdp"] == {4: rows["hsdp"][4]}  # not with two ranks
    assert rows["hsdp"][4]["efficiency"] == 1.0


def test_each_number_is_a_run_of_as_many_groups(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def compare(options: MethodOptions) -> int:
        asked.append(options)
        options.out.mkdir(parents=True)
        (options.out / "report.json").write_text(json.dumps(REPORTS[options.nproc]))
        return 0

    argv = ["bench", "a.json", "--workers", "2", "--workers", "4,2", "--rounds", "3"]
    setting = "training.seed=1"
    given = MethodOptions(config=config, workers="4,2", settings=(setting,), argv=tuple(argv), out=tmp_path)
    assert run(given, compare, lambda _: None) == 0
    assert [options.nproc for options in asked] == [2, 4]
    assert asked[0].settings == (setting, "sdp.groups=2")
    own = str(tmp_path / "workers-2")
    assert list(asked[0].argv) == [
        "bench",
        "a.json",
        "--rounds",
        "3",
        "--set",
        "sdp.groups=2",
        "--nproc",
        "2",
        "--out",
        own,
    ]
    text = (tmp_path / "workers.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    assert "| ddp | 100 (1.00 ×; 100%) | 150 (–; 75%) |" in text
    assert "| hsdp | – | 80 (–; 100%) |" in text
    assert json.loads((tmp_path / "workers.json").read_text())["links"][0]["link"] == "1gbit"
    assert (tmp_path / "workers.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_ends_it(config: Path, tmp_path: Path) -> None:
    given = MethodOptions(config=config, workers="2,4", argv=("bench", "--workers=2,4"), out=tmp_path)
    assert run(given, lambda options: 2 if "--workers=2,4" not in options.argv else 0, lambda _: None) == 2
    assert not (tmp_path / "workers.md").exists()


def test_every_number_is_checked_before_the_first_is_run(config: Path, tmp_path: Path) -> None:
    checked = []

    def check(options: MethodOptions) -> None:
        checked.append((options.nproc, list(options.settings)))
        if options.nproc == 8:
            raise PlacementError("no such placement")

    given = MethodOptions(config=config, workers="8,2,4", out=tmp_path)
    with pytest.raises(ConfigError, match=r"^--workers 8,2,4: 8 cannot be run: no such placement$"):
        run(given, lambda _: pytest.fail("a run was started"), check)
    assert checked == [(count, [f"sdp.groups={count}"]) for count in (2, 4, 8)]


@pytest.mark.parametrize("text", ["", "2,", "1,2", "2,2", "two", "-2"])
def test_numbers_of_workers(text: str) -> None:
    assert parse_counts("8,2") == [2, 8]
    with pytest.raises(ConfigError, match="expected different numbers of ranks from 2 to"):
        parse_counts(text)


def test_a_batch_of_all_ranks_is_refused(config: Path, tmp_path: Path) -> None:
    given = MethodOptions(config=config, workers="2,4", settings=("train_batch_size=16",), out=tmp_path)
    with pytest.raises(ConfigError, match="train_batch_size: with --workers a rank's batch stays"):
        run(given, lambda _: 0, lambda _: None)
