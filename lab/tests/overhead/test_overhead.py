"""``python -m lab.overhead`` runs, compares the same work, and its report is complete. What it
measures is never asserted.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sdp

from lab.overhead.__main__ import main

ROOT = Path(sdp.__path__[0]).resolve()
TINY = (
    "--layers 4 --hidden 16 --intermediate 32 --heads 2 --vocab-size 64 --sequence 8 --micro-batch 2 "
    "--repeats 3 --warmup 1"
).split()
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it makes process groups."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ |= {"PYTHONPATH": str(Path(sdp.__path__[0]).parent)}
    command = [sys.executable, "-m", "lab.overhead", *TINY, *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a run prints, and its report."""
    file = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    done = bench("--json", str(file), *["--deepspeed"] * HAS_DEEPSPEED)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_report_names_model_batch_and_software(outcome: tuple[str, dict[str, Any]]) -> None:
    settings = outcome[1]["settings"]
    expected = {
        "layers": 4,
        "hidden": 16,
        "micro_batch": 2,
        "sequence": 8,
        "groups": 4,
        "capacity": 0.5,
        "threads": 1,
        "repeats": 3,
    }
    assert settings.items() >= expected.items()
    assert all(settings[name] for name in ("torch", "python", "device", "dtype", "optimizer"))


def test_every_timing_is_complete_and_compared_with_the_loop(outcome: tuple[str, dict[str, Any]]) -> None:
    one, many, neurons, *under_deepspeed = outcome[1]["comparisons"]
    assert len(one["timings"]) == 4
    assert len(many["timings"]) == len(neurons["timings"]) == 2
    for comparison in (one, many, neurons):
        base = comparison["timings"][0]
        assert base["name"] == "hand-written loop"
        assert base["ratios"] == [1.0] * 3
        for timing in comparison["timings"]:
            assert all(seconds > 0 for seconds in timing["seconds"])
            assert timing["ratios"] == pytest.approx(
                [a / b for a, b in zip(timing["seconds"], base["seconds"], strict=True)]
            )
            assert timing["median_seconds"] == sorted(timing["seconds"])[1]
            assert timing["median_ratio"] == sorted(timing["ratios"])[1]
    assert [[timing["name"] for timing in comparison["timings"]] for comparison in under_deepspeed] == [
        ["DeepSpeed alone", "sdp, one group"]
    ] * 2 * HAS_DEEPSPEED


def test_both_sides_train_the_same_smaller_model(outcome: tuple[str, dict[str, Any]]) -> None:
    for comparison in outcome[1]["comparisons"]:
        loop, engine = comparison["timings"][:2]
        assert loop["parameters"] == engine["parameters"]
        assert comparison["weight_difference"] <= 1e-6
    held, *_, whole = outcome[1]["comparisons"][0]["timings"]
    assert whole["parameters"] > held["parameters"]


def test_the_terminal_shows_every_timing(outcome: tuple[str, dict[str, Any]]) -> None:
    printed, report = outcome
    for comparison in report["comparisons"]:
        assert comparison["name"] in printed
        assert (
            f"aim: at most {comparison['aim']:.2f}: {'reached' if comparison['reached'] else 'NOT reached'}" in printed
        )
        for timing in comparison["timings"]:
            assert f"{timing['median_ratio']:.3f}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats: '0' is not a positive whole number"),
        (["--capacity", "0.1"], "every unit needs at least one"),
        (["--heads", "3"], "hidden_size 16 is not divisible by num_attention_heads 3"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_refuses_a_launcher_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(TINY) == 2
    assert "lab.overhead times one rank" in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = bench("--json", str(tmp_path / "file" / "bench.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lab.overhead: error: --json {tmp_path}/file/bench.json: cannot be written (")
    assert done.stderr.count("\n") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "1000000000"], "--layers: 1000000000 is too large; the most is 65,536"),
        (["--groups", str(10**18)], "--groups: 1000000000000000000 is too large"),
        (["--micro-batch", str(10**30)], "--micro-batch: 1"),
        (["--vocab-size", "16777216", "--sequence", "16777216"], "at most 274,877,906,944 are computed"),
        (["--hidden", "16777212"], "weights; at most 274,877,906,944 are timed"),
        (["--repeats", str(10**20)], "--repeats: 1"),
        (["--threads", str(10**15)], "--threads: 1"),
    ],
)
def test_sizes_that_no_machine_has_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
