"""``sdp gpu-check``: the rows, their plans, and the options. Nothing is measured."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest
import torch
from sdp.engine.errors import ConfigError
from sdp.tools.gpu_check import command
from sdp.tools.gpu_check.command import add_arguments
from sdp.tools.gpu_check.rows import CONFIGS, DENSE, NAMES, UNCOMPILED, Plans, Row, job_of, planned, rows
from sdp.tools.shared.variants import Variant

HALF = Variant(0.5, "block", "forward")


ONE_B = CONFIGS[0]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_rows_that_goals_are_about_come_first_and_share_their_graphs() -> None:
    every = rows(CONFIGS, NAMES)
    assert len(every) == len(set(every)) == 3 * (1 + 3 * 4) + 1
    assert [row.name for row in every[:5]] == [
        "1 dense",
        *(f"{c} block forward" for c in (0.75, 0.5, 0.375)),
        UNCOMPILED.name,
    ]
    goals = [row for row in every if (row.variant.granularity, row.variant.masking) in (("", ""), ("block", "forward"))]
    assert every[: len(goals)] == goals
    families = [family for family, _ in itertools.groupby(every, lambda row: row.family)]
    assert families[:4] == [
        row.family for row in (every[0], UNCOMPILED, Row(CONFIGS[1], DENSE), Row(CONFIGS[2], DENSE))
    ]
    assert rows(["llama_134m"], [UNCOMPILED.name]) == []


def test_rows_of_a_configuration_have_one_micro_batch() -> None:
    jobs = {row: job_of(row) for row in rows(CONFIGS, NAMES)}
    for config in CONFIGS:
        sizes = {job.config["train_micro_batch_size_per_gpu"] for row, job in jobs.items() if row.config == config}
        assert len(sizes) == 1
    assert job_of(UNCOMPILED, micro_batch=3).config["train_micro_batch_size_per_gpu"] == 3
    assert [job_of(row).config["training"]["compile"] for row in (UNCOMPILED, Row(ONE_B, HALF))] == [False, True]


def test_a_variant_of_no_chosen_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="of no configuration but llama_1b"):
        command.run(arguments("--configs", "llama_134m", "--variants", UNCOMPILED.name))


def test_another_process_makes_the_same_plan() -> None:
    row = Row("llama_134m", HALF)
    job = job_of(row, tiny=True)
    with Plans({row: job}, workers=1, device="cuda") as plans:
        here = planned(job, "cuda")
        assert plans.of(row) == here
    assert here.peak_memory_bytes < planned(job, "cpu").peak_memory_bytes
    assert here.flops > 0
    assert here.peak_memory_bytes > here.state_bytes


def test_a_dry_run_lists_what_rows_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.run(arguments("--dry-run", "--tiny", "--configs", "llama_134m", "--variants", "0.5 block forward")) == 0
    )
    assert capsys.readouterr().out.startswith(
        "llama_134m  0.5 block forward               2 x 32 tokens  state   0.00 GiB  peak"
    )


def test_a_list_of_rows_has_no_figures_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json: has no effect with --dry-run"):
        command.run(arguments("--dry-run", "--json", str(tmp_path / "check.json")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("minutes", ["nan", "-1", "0", "inf", "soon"])
def test_minutes_are_a_positive_number(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(f"--minutes={minutes}")
    assert f"argument --minutes: {minutes!r} is not a positive number" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments("--json", str(tmp_path / "check.json"))) == 0
    assert "torch finds no CUDA device here; nothing was checked" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text()) == {"skipped": "no CUDA device"}
